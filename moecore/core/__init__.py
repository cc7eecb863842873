"""Foundations that all other rooms use; this room imports none of them.

``config``: frozen settings, and families of parts. ``surroundings``: what parts are combined with.
``files``: atomic writes, errors that a user can fix, location of raw data. ``kept_parts``: results
that survive a kill. ``outside_packages``: packages with parts. ``plain_values``,
``encoded_arrays``, ``safetensors_files``: values as JSON, text and tensors. ``routing_records``:
what routers and models return. ``streams``: random draws. ``ranks``: processes of one training.
``source_layout``: locations of code. ``operating_system``, ``torch_internals``: what not every
system, or no public name, offers.
"""
