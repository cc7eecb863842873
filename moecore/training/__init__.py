"""Training: settings, methods, the loop, losses, teachers, and saved models.

``method`` ``settings``: what params.yaml configures · ``phase_trainings`` ``job``: model, images
and loss of a training · ``loop`` ``meter`` ``monitor``: the steps, and what is logged ·
``artifacts``: saved models, and how a training resumes · ``distributed_training``: several ranks ·
``runtime``: the machine · ``upcycling_kinds`` ``upcycle`` ``single_tissue_volumes``:
needed by single methods · ``outcome``: the trained model's result.

To change the loss, write a regularizer in ``regularizers/``. ``teachers/`` holds the models that
guide routing, and ``surgery/`` removes experts from a trained model.
"""
