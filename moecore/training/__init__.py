"""How a model learns.

``method`` ``settings`` what params.yaml says · ``phase_trainings`` ``job`` what is trained on what,
and under which loss · ``loop`` ``meter`` ``monitor`` the steps and what is logged of them ·
``checkpoint`` ``sharded_state`` ``distributed_training`` kill and resume, several ranks ·
``runtime`` the machine · ``guide`` ``upcycling_kinds`` ``upcycle`` ``single_tissue_volumes`` what
single methods add · ``artifacts`` ``outcome`` the trained model and its result.

To change the loss, write a regularizer in ``regularizers/``; ``teachers/`` holds what guides, and
``surgery/`` takes experts out of a trained model.
"""
