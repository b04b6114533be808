"""The checks of `make gpu-check`, tried without a GPU: they pass here, so a failure there is the GPU's."""

import importlib.util
import sys

import pytest
import torch

from host_device import ROOT


@pytest.fixture(scope="module")
def gpu_check():
    sys.path.append(str(ROOT / "benches"))
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benches" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_checks_pass(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--host"])
    for name in ("DEVICE", "HEAD_DIMS"):  # They are put back afterwards.
        monkeypatch.setattr(gpu_check, name, getattr(gpu_check, name))
    assert gpu_check.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "passed, without a GPU"


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
