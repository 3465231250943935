"""What becomes a tensor, and what is refused."""

import array
import ctypes
import gc
import sys
import unittest
from unittest import mock

import numpy as np

import vanward
from vanward import _tensor


def view(value, writable=False):
    return _tensor.view(value, writable)[0]


def facts(tensor):
    n = tensor.ndim
    return (tensor.dtype_code, tensor.dtype_bits, list(tensor.shape[:n]), list(tensor.strides[:n]))


class OnlyDLPack:
    """An array that is seen through DLPack alone."""

    def __init__(self, array, versioned=True):
        self.array, self.versioned = array, versioned

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        if max_version is not None and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(max_version=max_version if self.versioned else None)


class OnDevice:
    """A capsule made by hand, as a CUDA library would give it."""

    def __init__(self, name=b"dltensor", device=2, rank=2, lanes=1, flags=0, major=1):
        self.name, self.device = name, device
        self.shape = (ctypes.c_int64 * rank)(*range(3, 3 + rank))
        if name == b"dltensor_versioned":
            self.managed = _tensor._DLManagedTensorVersioned(major=major, flags=flags)
        else:
            self.managed = _tensor._DLManagedTensor()
        t = self.managed.dl_tensor
        t.data, t.byte_offset, t.device_type, t.device_id = 0x10000, 64, device, 1
        t.ndim, t.code, t.bits, t.lanes = rank, 4, 16, lanes
        t.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        self.streams = []

    def __dlpack_device__(self):
        return (self.device, 1)

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), self.name, None)


class Buffers(unittest.TestCase):
    def test_numpy_types_have_their_codes(self):
        for code, kinds in {0: "i1 i2 i4 i8", 1: "u1 u2 u4 u8", 2: "f2 f4 f8", 6: "?"}.items():
            for kind in kinds.split():
                a = np.zeros((2, 3), kind)
                self.assertEqual(facts(view(a)), (code, 8 * a.itemsize, [2, 3], [3, 1]), kind)
                self.assertEqual(facts(view(OnlyDLPack(a))), facts(view(a)), kind)

    def test_strides_are_in_elements_and_keep_their_sign(self):
        a = np.zeros((4, 6, 2), np.float32)[::2, ::-3, 0]
        for seen in (view(a), view(OnlyDLPack(a)), view(OnlyDLPack(a, versioned=False))):
            self.assertEqual(facts(seen), (2, 32, [2, 2], [24, -6]))
            self.assertEqual(seen.data, a.ctypes.data)

    def test_other_exporters(self):
        self.assertEqual(facts(view(array.array("q", [1, 2]))), (0, 64, [2], [1]))
        self.assertEqual(facts(view(b"abc")), (1, 8, [3], [1]))
        self.assertEqual(facts(view(memoryview(bytearray(12)).cast("i", (3, 1)))), (0, 32, [3, 1], [1, 1]))
        self.assertEqual(facts(view((ctypes.c_float * 5)())), (2, 32, [5], [1]))

    def test_bfloat16_and_pinned_are_said(self):
        a = np.zeros(4, np.uint16)
        self.assertEqual(facts(view(vanward.bfloat16(a))), (4, 16, [4], [1]))
        self.assertEqual(view(vanward.pinned(vanward.bfloat16(a))).device_type, 3)
        with self.assertRaisesRegex(TypeError, "32-bit elements taken for bfloat16"):
            view(vanward.bfloat16(np.zeros(4, np.int32)))
        given = view(np.zeros(4, np.uint16))  # as the library describes memory of its own
        self.assertEqual(facts(view(vanward.bfloat16(given))), (4, 16, [4], [1]))
        self.assertEqual(facts(given), (1, 16, [4], [1]))

    def test_8_bit_floats_are_said(self):
        a = np.zeros((2, 3), np.uint8)
        self.assertEqual(facts(view(vanward.float8_e4m3fn(a))), (10, 8, [2, 3], [3, 1]))
        self.assertEqual(facts(view(vanward.float8_e5m2(a))), (12, 8, [2, 3], [3, 1]))
        with self.assertRaisesRegex(TypeError, "16-bit elements taken for float8_e4m3fn"):
            view(vanward.float8_e4m3fn(np.zeros(4, np.float16)))

    def test_read_only_memory_is_no_output(self):
        a = np.zeros(3, np.int32)
        a.flags.writeable = False
        for frozen in (a, OnlyDLPack(a), bytes(4), vanward.bfloat16(bytes(2))):
            with self.assertRaisesRegex(ValueError, "read-only"):
                view(frozen, writable=True)
        self.assertEqual(view(a).data, a.ctypes.data)

    def test_what_is_no_tensor_is_refused(self):
        for value in ([1, 2], 3, "abc", object()):
            with self.assertRaisesRegex(TypeError, "neither"):
                view(value)
        for value in (np.zeros(2, np.complex64), np.zeros(2, ">i4"), np.zeros(2, "S3"), np.zeros(2, "i4,f4")):
            with self.assertRaises((TypeError, ValueError)):
                view(value)
        with self.assertRaisesRegex(ValueError, "rank 6"):
            view(np.zeros((1,) * 6))
        with self.assertRaisesRegex(ValueError, "no multiples of the element's 4"):
            view(np.zeros(4, np.dtype({"names": ["x"], "formats": ["i4"], "itemsize": 5}))["x"])

    def test_a_view_keeps_the_memory_and_gives_it_back(self):
        memory = bytearray(8)
        tensor, keep = _tensor.view(memory, True)
        with self.assertRaises(BufferError):
            memory.append(1)
        del keep
        gc.collect()
        memory.append(1)


class DLPack(unittest.TestCase):
    def test_an_array_that_refuses_a_buffer_is_asked_for_dlpack(self):
        refuse = mock.Mock(side_effect=BufferError("not of this type"))
        with mock.patch.object(_tensor, "_from_buffer", refuse):
            self.assertEqual(facts(view(np.zeros((2, 3), np.float16))), (2, 16, [2, 3], [3, 1]))
            with self.assertRaisesRegex(BufferError, "not of this type"):
                view(b"abc")

    def test_device_tensors_carry_device_offset_and_compact_strides(self):
        for name in (b"dltensor", b"dltensor_versioned"):
            t = view(OnDevice(name))
            self.assertEqual((t.device_type, t.device_id, t.data), (2, 1, 0x10040))
            self.assertEqual(facts(t), (4, 16, [3, 4], [4, 1]))

    def test_an_export_asks_the_producer_not_to_synchronise(self):
        on_device, on_host = OnDevice(), OnDevice(device=1)
        view(on_device)
        view(on_host)
        self.assertEqual((on_device.streams, on_host.streams), ([-1], [None]))

    def test_capsules_that_do_not_fit_are_refused(self):
        for wrong, message in [
            (OnDevice(rank=6), "rank 6"),
            (OnDevice(lanes=4), "4 lanes"),
            (OnDevice(b"used_dltensor"), "no DLPack capsule"),
            (OnDevice(b"dltensor_versioned", major=2), "expected version 1"),
        ]:
            with self.assertRaisesRegex((TypeError, ValueError), message):
                view(wrong)
        with self.assertRaisesRegex(ValueError, "read-only"):
            view(OnDevice(b"dltensor_versioned", flags=1), writable=True)

    def test_a_sign_that_only_torch_knows_is_refused(self):
        lazy = OnDevice()
        lazy.is_neg = lambda: True
        with self.assertRaisesRegex(ValueError, "resolve_neg"):
            view(lazy)
        lazy.is_neg = lambda: False
        self.assertEqual(view(lazy).device_id, 1)

    def test_the_capsule_keeps_the_array_and_lets_it_go(self):
        for versioned in (True, False):
            a = np.arange(1000)
            before = sys.getrefcount(a)
            tensor, keep = _tensor.view(OnlyDLPack(a, versioned), False)
            self.assertGreater(sys.getrefcount(a), before)
            del keep
            gc.collect()
            self.assertEqual(sys.getrefcount(a), before)


if __name__ == "__main__":
    unittest.main()
