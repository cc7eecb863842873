"""Not a stage: forks them, for ``moecore run`` (see moecore/pipeline/stage_fork_server.py).

``python -m moecore.stages.fork_server SOCKET``
"""

import sys

import scipy.stats  # noqa: F401 - the first interval of a process would import it
import torch

from moecore.pipeline.stage_fork_server import serve_stages
from moecore.stages.calibrate import calibrate
from moecore.stages.code import code
from moecore.stages.compare import compare
from moecore.stages.finetune import finetune
from moecore.stages.linear_experts import linear_experts
from moecore.stages.measure import measure
from moecore.stages.merge_experts import merge_experts
from moecore.stages.out_of_fold import out_of_fold
from moecore.stages.prepare import prepare
from moecore.stages.pretrain import pretrain
from moecore.stages.prune_experts import prune_experts
from moecore.stages.robustness import robustness
from moecore.stages.sizes import sizes
from moecore.stages.teacher import teacher
from moecore.stages.teacher_router import teacher_router
from moecore.stages.transfer import transfer

STAGES = (
    calibrate,
    code,
    compare,
    finetune,
    linear_experts,
    measure,
    merge_experts,
    out_of_fold,
    prepare,
    pretrain,
    prune_experts,
    robustness,
    sizes,
    teacher,
    teacher_router,
    transfer,
)

if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports torch's compiler
    serve_stages(sys.argv[1], {stage.__name__: stage for stage in STAGES})
