"""What every other room uses; it imports none of them.

``config`` frozen settings · ``records`` what routers and models return · ``files`` ``inside``
whole files, errors that a user can mend, paths that stay inside · ``tensors`` ``encoded_arrays``
``plain`` values as safetensors, short text and JSON · ``streams`` random draws of (seed, step) ·
``ranks`` the processes of one training · ``sources`` ``roots`` where code and data lie.
"""
