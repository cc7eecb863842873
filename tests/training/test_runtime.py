import json
from pathlib import Path

import torch

from moecore.training.runtime import tune


def test_what_is_chosen_is_reported_and_remembered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOECORE_DEVICE", "cpu")
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        runtime = tune()
        assert runtime.device == "cpu" and runtime.matmul_error < 1e-5 and runtime.bf16_speedup > 0
        assert (
            runtime.matmul_precision == torch.get_float32_matmul_precision()
            and runtime.threads == torch.get_num_threads()
        )
        assert (
            runtime.dtype("float32") == torch.float32
            and runtime.dtype("bfloat16") == torch.bfloat16
        )
        assert runtime.dtype() == (torch.bfloat16 if runtime.bf16_speedup >= 1.3 else torch.float32)
        remembered = Path(".state/runtime.json")
        (machine,) = json.loads(remembered.read_text())
        remembered.write_text(json.dumps({machine: 9.0}))
        assert tune().bf16_speedup == 9.0
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
