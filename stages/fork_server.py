"""Not a stage: forks them, for ``moecore run`` (see moecore/pipeline/forked.py).

``python -m stages.fork_server SOCKET``
"""

import sys

import scipy.stats  # noqa: F401 - the first interval of a process would import it
import torch

from moecore.pipeline.forked import serve_stages
from stages.calibrate import calibrate
from stages.code import code
from stages.compare import compare
from stages.finetune import finetune
from stages.linear_experts import linear_experts
from stages.measure import measure
from stages.out_of_fold import out_of_fold
from stages.prepare import prepare
from stages.pretrain import pretrain
from stages.robustness import robustness
from stages.sizes import sizes
from stages.teacher import teacher
from stages.teacher_router import teacher_router
from stages.transfer import transfer

STAGES = (
    calibrate,
    code,
    compare,
    finetune,
    linear_experts,
    measure,
    out_of_fold,
    prepare,
    pretrain,
    robustness,
    sizes,
    teacher,
    teacher_router,
    transfer,
)

if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports torch's compiler
    serve_stages(sys.argv[1], {stage.__name__: stage for stage in STAGES})
