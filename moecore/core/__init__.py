"""What every other room uses; it imports none of them.

``config`` frozen settings, and families of parts · ``files`` whole files, errors that a user can
mend, paths that stay inside, where raw data lie · ``outside_packages`` packages with parts, and
versions · ``plain_values`` ``encoded_arrays`` ``safetensors_files`` values as JSON, as short text
and as named tensors · ``routing_records`` what routers and models return · ``streams`` random draws
of (seed, step) · ``ranks`` the processes of one training · ``source_layout`` where code lies ·
``operating_system`` ``torch_internals`` what not every system, and no public name, offers.
"""
