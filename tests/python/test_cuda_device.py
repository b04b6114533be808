"""The GPU's side of the CUDA backend as far as it goes without one: the cache of kernels, the launch."""

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from pagedkv.errors import BackendUnavailable
from pagedkv.ops import cuda_device, nvrtc
from pagedkv.ops.cuda_device import GpuKernel, KernelCache
from pagedkv.ops.cuda_kernels import Kernel, ParamLayout
from pagedkv.ops.nvrtc import Compiled

KERNEL = Kernel("twice", (("PKV_ELEMENT", "bf16"),))
SOURCES = {
    "twice.cu": '#include "twice.cuh"\nextern "C" __global__ void twice() {}\n',
    "twice.cuh": "struct TwiceParams {\n  const float* x;  // [n]\n  int64_t stride;\n  float factor;\n};\n",
}


class FakeCompiler:
    """Counts what it is asked for."""

    version = (13, 2)

    def __init__(self):
        self.calls = []

    def compile(self, name, sources, arch, options):
        self.calls.append((name, arch, tuple(options)))
        return Compiled(f"{name} for {arch}".encode(), "", "")


@pytest.fixture
def compiler(monkeypatch):
    fake = FakeCompiler()
    monkeypatch.setattr(nvrtc, "load", lambda: fake)
    return fake


def test_a_kernel_is_compiled_once(tmp_path, compiler):
    for _ in range(2):
        cache = KernelCache(tmp_path / "kernels", SOURCES, "sm_90")
        cache.fill([KERNEL])
        assert cache.cubin(KERNEL) == b"twice.cu for sm_90"
    assert len(compiler.calls) == 1
    assert "-DPKV_ELEMENT=bf16" in compiler.calls[0][2]


def test_what_a_kernel_depends_on_is_its_key(tmp_path, compiler):
    changed = SOURCES | {"twice.cuh": SOURCES["twice.cuh"] + "\n"}
    other = Kernel("twice", (("PKV_ELEMENT", "half"),))
    paths = {
        KernelCache(tmp_path, SOURCES, "sm_90").path(KERNEL),
        KernelCache(tmp_path, changed, "sm_90").path(KERNEL),
        KernelCache(tmp_path, SOURCES, "sm_100").path(KERNEL),
        KernelCache(tmp_path, SOURCES, "sm_90").path(other),
    }
    compiler.version = (13, 3)
    paths.add(KernelCache(tmp_path, SOURCES, "sm_90").path(KERNEL))
    assert len(paths) == 5


def test_a_directory_that_cannot_be_written_is_no_obstacle(tmp_path, compiler, caplog):
    (tmp_path / "file").write_text("")
    cache = KernelCache(tmp_path / "file" / "kernels", SOURCES, "sm_90")
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file" / "kernels").mkdir()
    assert cache.cubin(KERNEL) == b"twice.cu for sm_90"
    assert "cannot be kept in" in caplog.text


def test_parameters_are_packed_as_the_source_declares_them():
    layout = ParamLayout("twice", SOURCES)
    assert layout.names == ("x", "stride", "factor")
    assert layout.num_bytes == 24
    packed = layout.pack(factor=0.5, x=1 << 40, stride=-3)
    assert packed == (1 << 40).to_bytes(8, "little") + b"\xfd" + b"\xff" * 7 + b"\0\0\0\x3f" + bytes(4)
    with pytest.raises(AssertionError, match="no such parameters: other"):
        layout.pack(x=0, stride=0, factor=0, other=1)


def test_a_launch_hands_the_driver_one_struct(monkeypatch):
    launches = []

    class Driver:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

        def funcSetAttribute(self, *arguments):
            launches.append(arguments)

        def launchKernel(self, *arguments):
            *rest, params, extra = arguments
            # As the driver does: an array with one pointer, to bytes that it copies.
            address = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
            launches.append((*rest, ctypes.string_at(address, 4), extra))

    streams = {torch.device("cuda:1"): SimpleNamespace(cuda_stream=5)}
    module = SimpleNamespace(get_function=lambda name: SimpleNamespace(ptr=77))
    monkeypatch.setattr(torch.cuda, "current_stream", streams.get)
    kernel = GpuKernel(Driver(), module, "twice", 200_000, torch.device("cuda:1"))
    kernel.launch((4, 2), 128, 1000, bytearray(b"abcd"))
    assert launches == [(77, 8, 200_000), (77, 4, 2, 1, 128, 1, 1, 1000, 5, b"abcd", 0)]


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(BackendUnavailable, match="pip install cupy-cuda13x"):
        cuda_device.Gpu(torch.device("cuda:0"))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    module = SimpleNamespace(Module=None, driver=None)
    for name in ("cupy", "cupy.cuda", "cupy.cuda.function", "cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BackendUnavailable, match=r"^device is cuda:3, allowed: cuda:0 to cuda:1$"):
        cuda_device.Gpu(torch.device("cuda:3"))
