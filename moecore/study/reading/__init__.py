"""What reads: YAML with places, settings from it, and the layers that come to a params.yaml.

``study.Study`` is the whole of params.yaml; ``params.read_params`` gives a stage its sections;
``setting_errors`` and ``messages`` say what is wrong in a line.
"""
