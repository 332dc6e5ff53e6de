#!/usr/bin/env python3
"""Make, read and change the state file behind fake_nvml.c.

    s = State.create("state.bin", gpus=4)            # test process
    s.set(2, "temp", 97); s.set(2, "throttle", 0x20) # thermal slowdown
    s.fall_off(1)                                    # GPU lost + XID 79
    s.xid(0, 48); s.set(0, "ecc_uncorr", 1)          # double-bit ECC
    s.slow(3, ["UTIL"], 2_000_000)                   # call takes 2 s
    s.hang(3, ["PROCS"]); s.hang(3, [])              # blocks until cleared
From a shell: fake_nvml.py FILE create N | set GPU FIELD VALUE | xid GPU NUMBER | falloff GPU | show
"""

import mmap
import struct
import sys
import zlib
from pathlib import Path

MAXGPU, MAXPROC, MAXLINK, MAXEV = 16, 16, 18, 64
STRINGS = [("uuid", 96), ("name", 96), ("bus", 32), ("serial", 32)]
NUMBERS = [
    "mem_total",
    "mem_used",
    "mem_reserved",
    "util_gpu",
    "util_mem",
    "temp",
    "power_mw",
    "limit_mw",
    "sm_clock",
    "mem_clock",
    "throttle",
    "ecc_on",
    "ecc_corr",
    "ecc_uncorr",
    "mig_on",
    "numa",
    "link_gen",
    "link_width",
    "nproc",
    "retired_pending",
    "remap_failure",
    "fan",
    "err",
    "err_mask",
    "err_code",
    "slow_mask",
    "slow_us",
    "hang_mask",
    "energy_mj",
]
CALLS = [
    "HANDLE",
    "NAME",
    "UUID",
    "MEM",
    "UTIL",
    "TEMP",
    "POWER",
    "LIMIT",
    "PROCS",
    "ECC",
    "TOPO",
    "P2P",
    "NVLINK",
    "MIG",
    "EVENT",
    "CLOCK",
    "PCI",
    "THROTTLE",
    "FAN",
    "PCIE",
    "ENERGY",
]
GPU_LOST, GPU_IS_LOST_XID = 15, 79
XID_EVENT, DBE_EVENT = 0x8, 0x2

_off, _pos = {}, 0
for _n, _w in STRINGS:
    _off[_n] = (_pos, _w)
    _pos += _w
for _n in NUMBERS:
    _off[_n] = (_pos, 0)
    _pos += 8
P_PROC, P_LINK = _pos, _pos + 16 * MAXPROC
P_TOPO = P_LINK + 8 * MAXLINK
P_P2P = P_TOPO + 8 * MAXGPU
GPU_SIZE = P_P2P + 8 * MAXGPU
H_NGPU, H_INIT_ERR, H_INIT_SLOW, H_EV, H_CALLS, H_DRIVER, H_NVML, H_CUDA = 8, 16, 24, 32, 40, 48, 128, 208
H_RING = 272
H_GPU = H_RING + 32 * MAXEV
SIZE = H_GPU + GPU_SIZE * MAXGPU


class State:
    def __init__(self, path):
        with Path(path).open("r+b") as f:
            self.m = mmap.mmap(f.fileno(), SIZE)

    @classmethod
    def create(cls, path, gpus=4, name="NVIDIA H100 80GB HBM3", mem=80 << 30):
        tmp = Path(f"{path}.tmp")
        with tmp.open("wb") as f:
            f.truncate(SIZE)
        tmp.replace(path)
        s = cls(path)
        s.m[0:8] = b"FAKENVML"
        s._q(H_NGPU, gpus)
        s._s(H_DRIVER, 80, "550.54.15")
        s._s(H_NVML, 80, "12.550.54.15")
        s._q(H_CUDA, 12040)
        for i in range(gpus):
            for k, v in {
                "uuid": f"GPU-{i:08x}-0000-4000-8000-{zlib.crc32(str(path).encode()):012x}",
                "name": name,
                "bus": f"00000000:{0x10 + i:02X}:00.0",
                "serial": f"{1000 + i}",
                "mem_total": mem,
                "mem_reserved": 600 << 20,
                "temp": 35,
                "power_mw": 70000,
                "limit_mw": 700000,
                "sm_clock": 1980,
                "mem_clock": 2619,
                "ecc_on": 1,
                "link_gen": 5,
                "link_width": 16,
            }.items():
                s.set(i, k, v)
            for j in range(gpus):
                s.topo(i, j, 0 if i == j else 30 if i // 4 == j // 4 else 50)
        return s

    def _q(self, off, v):
        struct.pack_into("<Q", self.m, off, v)

    def _s(self, off, width, text):
        self.m[off : off + width] = text.encode()[: width - 1].ljust(width, b"\0")

    def _at(self, gpu):
        return H_GPU + GPU_SIZE * gpu

    def set(self, gpu, field, value):
        off, width = _off[field]
        (self._s(self._at(gpu) + off, width, value) if width else self._q(self._at(gpu) + off, int(value)))

    def get(self, gpu, field):
        off, width = _off[field]
        off += self._at(gpu)
        return self.m[off : off + width].split(b"\0")[0].decode() if width else struct.unpack_from("<Q", self.m, off)[0]

    def procs(self, gpu, pairs):
        for i, (pid, mem) in enumerate(pairs[:MAXPROC]):
            struct.pack_into("<QQ", self.m, self._at(gpu) + P_PROC + 16 * i, pid, mem)
        self.set(gpu, "nproc", min(len(pairs), MAXPROC))

    def nvlink(self, gpu, link, state):
        self._q(self._at(gpu) + P_LINK + 8 * link, state)

    def topo(self, a, b, level, p2p=0):
        self._q(self._at(a) + P_TOPO + 8 * b, level)
        self._q(self._at(a) + P_P2P + 8 * b, p2p)

    def event(self, gpu, kind, data):
        head = struct.unpack_from("<Q", self.m, H_EV)[0]
        struct.pack_into("<QQQQ", self.m, H_RING + 32 * (head % MAXEV), head, gpu, kind, data)
        self._q(H_EV, head + 1)

    def xid(self, gpu, number):
        self.event(gpu, XID_EVENT, number)

    def fall_off(self, gpu):
        self.set(gpu, "err", GPU_LOST)
        self.xid(gpu, GPU_IS_LOST_XID)

    def recover(self, gpu):
        for f in ("err", "err_mask", "slow_mask", "hang_mask"):
            self.set(gpu, f, 0)

    @staticmethod
    def mask(calls):
        return sum(1 << CALLS.index(c) for c in calls)

    def fail(self, gpu, calls, code):
        self.set(gpu, "err_code", code)
        self.set(gpu, "err_mask", self.mask(calls))

    def slow(self, gpu, calls, usec):
        self.set(gpu, "slow_us", usec)
        self.set(gpu, "slow_mask", self.mask(calls))

    def hang(self, gpu, calls):
        self.set(gpu, "hang_mask", self.mask(calls))

    def init_error(self, code, slow_us=0):
        self._q(H_INIT_ERR, code)
        self._q(H_INIT_SLOW, slow_us)

    @property
    def gpus(self):
        return struct.unpack_from("<Q", self.m, H_NGPU)[0]

    @property
    def calls(self):
        return struct.unpack_from("<Q", self.m, H_CALLS)[0]


def main(a):
    if a[1] == "create":
        State.create(a[0], int(a[2]))
        return
    s = State(a[0])
    if a[1] == "set":
        s.set(int(a[2]), a[3], a[4] if _off[a[3]][1] else int(a[4], 0))
    elif a[1] == "xid":
        s.xid(int(a[2]), int(a[3]))
    elif a[1] == "falloff":
        s.fall_off(int(a[2]))
    elif a[1] == "show":
        for g in range(s.gpus):
            print(g, {f: s.get(g, f) for f in _off})
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:]) if len(sys.argv) > 2 else sys.exit(__doc__)
