"""The heap of a rank on a CPU: glibc's, set to keep freed memory and to use huge pages."""

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
MOST_RESERVED_BYTES = 16 << 30
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
HEAP_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
    "MALLOC_PERTURB_",  # fills freed memory, and so would write to all reserved memory
)


def set_up_heap() -> None:
    """Make glibc keep freed memory for this process instead of returning it to the system, and use huge pages.

    The activations of a step are freed by its end. By default, glibc returns them if they are large or at the top of
    the heap, and the next step takes a page fault for each page that it writes to. In pages of 2 MB instead of 4 kB,
    the processor also finds what it reads and writes with far fewer look-ups in page tables. Linux may be set to give
    huge pages always, on request, or never (its documentation, "Transparent Hugepage Support").

    The heap grows by small amounts, and each of them would have to request huge pages. Hence address space is reserved
    for it in advance. A page takes memory from its first write on, for good: a process holds the memory that it needed
    at its peak.

    Call it in the main thread; glibc gives each other thread a separate heap. Does nothing without glibc, or where
    environment variables set up its heap.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in tunables or any(name in os.environ for name in HEAP_VARIABLES):
        return
    with suppress(OSError, AttributeError, TypeError):  # another C library, or another system
        libc = ctypes.CDLL("libc.so.6")  # not the functions that LD_PRELOAD may put in place of its own
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # the top of the heap is never returned
        libc.mallopt(M_MMAP_MAX, 0)  # large blocks are also in the heap
        if OVERCOMMIT.read_text().strip() != "2":  # with 2, memory that one process reserves is lost to the others
            _reserve(libc, min(MOST_RESERVED_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2))


def _reserve(libc: ctypes.CDLL, size: int) -> None:
    """Grow the heap by `size` bytes of address space, and request huge pages for it.

    Raises:
        OSError: the size is not allowed. (If `malloc` met this error, glibc would change over to another heap.)
    """
    mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if block is None:
        return
    unaligned = -block % mmap.PAGESIZE
    libc.madvise(block + unaligned, size - unaligned, mmap.MADV_HUGEPAGE)
    libc.free(block)  # back to the heap, whose top it now is
