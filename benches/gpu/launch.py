"""Kernels that the benchmarks have beside those of the library: compiled by the NVRTC that torch brings along, and launched as the library launches its own."""

import ctypes
import glob
import site

import torch


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p)]
    _fields_ += [("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)]


def _library(name):
    """A library of the CUDA toolkit that torch brings along."""
    found = [path for root in site.getsitepackages() for path in glob.glob(f"{root}/nvidia/**/{name}.so.*", recursive=True)]
    return ctypes.CDLL(sorted(found)[0] if found else f"{name}.so")


class Module:
    def __init__(self, source):
        nvrtc, self._cuda = _library("libnvrtc"), ctypes.CDLL("libcuda.so.1")
        program, size, self._module = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_void_p()
        assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
        options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_%d%d" % torch.cuda.get_device_capability())
        assert nvrtc.nvrtcCompileProgram(program, 1, options) == 0
        assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        code = ctypes.create_string_buffer(size.value)
        assert nvrtc.nvrtcGetCUBIN(program, code) == 0
        assert self._cuda.cuModuleLoadData(ctypes.byref(self._module), code) == 0

    def kernel(self, name, shared, has_large_clusters=False):
        """A kernel of so many bytes of dynamic shared memory; None where there is not as much."""
        kernel = ctypes.c_void_p()
        assert self._cuda.cuModuleGetFunction(ctypes.byref(kernel), self._module, name.encode()) == 0
        if has_large_clusters:  # of more than 8 CTAs
            assert self._cuda.cuFuncSetAttribute(kernel, 14, 1) == 0
        return kernel if self._cuda.cuFuncSetAttribute(kernel, 8, shared) == 0 else None

    def launch(self, kernel, grid, threads, shared, arguments, cluster=0):
        """
        On the current stream. From compute capability 9.0 on the next kernel begins before this one ends, and waits by itself (programmatic stream
        serialization).
        """
        attributes = int(torch.cuda.get_device_capability() >= (9, 0)) + (cluster > 0)
        early, clusters = Attribute(id=6, value=(ctypes.c_int * 16)(1)), Attribute(id=4, value=(ctypes.c_int * 16)(cluster, 1, 1))
        stream = torch.cuda.current_stream().cuda_stream
        config = Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared, stream, (Attribute * 2)(early, clusters), attributes)
        assert self._cuda.cuLaunchKernelEx(ctypes.byref(config), kernel, arguments, None) == 0
