"""How a model learns.

``method`` ``settings``: what params.yaml configures · ``phase_trainings`` ``job``: model, images
and loss of a training · ``loop`` ``meter`` ``monitor``: the steps, and what is logged ·
``checkpoint`` ``sharded_state`` ``distributed_training``: resuming, several ranks · ``runtime``:
the machine · ``guide`` ``upcycling_kinds`` ``upcycle`` ``single_tissue_volumes``: needed by single
methods · ``artifacts`` ``outcome``: the trained model and its result.

To change the loss, write a regularizer in ``regularizers/``. ``teachers/`` holds the models that
guide routing, and ``surgery/`` removes experts from a trained model.
"""
