"""The checks of `make gpu-check`, tried without a GPU: they pass here, so a failure there is the GPU's."""

import importlib.util

import pytest
import torch

from host_device import ROOT, HostDevice
from pagedkv.ops.cuda import CudaOps


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benches" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE = torch.device("cpu")
    return module


def test_the_checks_pass(gpu_check, monkeypatch):
    torch.manual_seed(1)
    ops, report = CudaOps(HostDevice()), gpu_check.Report(limit_s=1000)
    monkeypatch.setattr(gpu_check, "HEAD_DIMS", (64, 128))
    gpu_check.check_attention(ops, report, ([(1, 20), (1, 90), (9, 40)],))
    gpu_check.check_rows(ops, report)
    gpu_check.check_sample(ops, report, vocab_size=1000)
    assert report.failures == []


def test_a_failure_is_reported(gpu_check):
    report = gpu_check.Report(limit_s=1000)
    report.check("good", 0.1, 0.2)
    report.check("bad", 0.3, 0.2)
    report.check("not a number", float("nan"), 0.2)
    assert [failure.split(":")[0] for failure in report.failures] == ["bad", "not a number"]


def test_without_a_gpu_it_says_so(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    assert gpu_check.main() == 2
    assert "torch sees no GPU" in capsys.readouterr().err
