"""How a model learns.

``method`` ``settings`` what params.yaml says · ``recipes`` ``job`` ``objective`` what is trained on
what · ``loop`` ``optimizer`` ``adversarial`` ``meter`` ``live_bytes`` the steps and what is logged
of them · ``checkpoint`` ``sharded_state`` ``spread`` kill and resume, several ranks · ``runtime``
``speed`` the machine · ``guide`` ``upcycle`` ``text_part`` ``tissue_isolation`` what single methods
add · ``artifacts`` ``outcome`` the trained model and its result.

To change the loss, write a regularizer in ``regularizers/``; ``teachers/`` holds what guides.
"""
