"""Foundations that all other rooms use; this room imports none of them.

``config``: frozen settings, families of parts, and what parts are combined with. ``files``: atomic
writes, results that survive a kill, errors that a user can fix, location of raw data.
``outside_packages``: packages with parts. ``arrays_as_text``, ``safetensors_files``: values as
JSON, text and tensors. ``routing_records``: what routers and models return. ``streams``: random
draws. ``ranks``: processes of one training. ``source_layout``: locations of code.
``operating_system``, ``torch_internals``: what not every system, or no public name, offers.
"""
