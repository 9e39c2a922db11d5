"""The faults of a GPU, recognised by MLX's messages.

MLX raises all of them as RuntimeError. Metal's texts are in MLX's backend/metal/allocator.cpp, and
in the NSError that device.cpp appends to "Command buffer execution failed" (mlx#479, mlx#3267,
mlx#3849); CUDA's are in backend/cuda/allocator.cpp, and in the result of cudaGetErrorString, which
utils.cpp appends to the name of the call that failed. Messages about headers are in
backend/cuda/jit_module.cpp, and in the log of NVIDIA's compiler, which that file quotes.
"""

import re
from enum import Enum

from mlxtune.core.machine.cuda import header_remedy, missing_header
from mlxtune.errors import GpuError, MemoryLimitError, MlxTuneError, one_line

# macOS ends commands that keep the GPU from drawing. Apple's driver reads the variable below when
# MLX opens the device. MLX's maintainers mention this variable; users reported that smaller command
# buffers did not help.
_NO_WATCHDOG = (
    "let the display sleep during training, or set AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1, a variable "
    "of Apple's driver, in mlxtune's environment"
)
_RESTART_REMEDY = "start mlxtune again, and restart the machine if that fails too"


class Fault(Enum):
    """A fault of the GPU: the messages that report it, its meaning, and its remedy."""

    OUT_OF_MEMORY = (
        # Includes messages of MLX's CPU backend and of numpy.
        r"unable to allocate|attempting to allocate|out of memory|insufficient memory"
        r"|memory allocation|ALLOC_FAILED",
        "memory ran out",
        "close other programs, or use a quantised base",
    )
    RESOURCE_LIMIT = (
        r"Resource limit \(\d+\) exceeded",
        "the GPU's limit on live buffers was reached",
        "start mlxtune again: a new process has no live buffers yet",
    )
    TIMEOUT = (
        r"Caused GPU (Timeout|Hang) Error",
        "the GPU stopped a command that took too long",
        _NO_WATCHDOG,
    )
    INTERACTIVITY = (
        r"Impacting Interactivity",
        "macOS stopped a GPU command that blocked the display",
        _NO_WATCHDOG,
    )
    VICTIM = (
        r"Innocent ?Victim|victim of GPU error|SubmissionsIgnored|prior/excessive GPU errors",
        "the GPU dropped a command because of an error in another command",
        _RESTART_REMEDY,
    )
    # After this fault, all CUDA calls in the process return the same error.
    LOST = (
        r"the launch timed out and was terminated|uncorrectable ECC error",
        "the GPU no longer serves this process",
        _RESTART_REMEDY,
    )
    # `fault_error` names the package.
    MISSING_HEADER = (
        r"cannot open source file|Can not find locations of CUDA headers",
        "a header of CUDA is missing",
        "then start mlxtune again",
    )

    def __init__(self, texts: str, meaning: str, remedy: str) -> None:
        self.texts = re.compile(texts, re.IGNORECASE)
        self.meaning = meaning
        self.remedy = remedy

    @property
    def asks_for_less(self) -> bool:
        """Whether a retry with less work may succeed.

        Other faults may be transient, so their work is retried once.
        """
        return self in (Fault.OUT_OF_MEMORY, Fault.TIMEOUT, Fault.INTERACTIVITY)

    @property
    def is_final(self) -> bool:
        """Whether the process cannot recover from the fault."""
        return self in (Fault.LOST, Fault.MISSING_HEADER)


def fault_of(error: BaseException) -> Fault | None:
    if isinstance(error, MlxTuneError):
        return None
    if isinstance(error, MemoryError):
        return Fault.OUT_OF_MEMORY
    if not isinstance(error, RuntimeError):
        return None
    return next((fault for fault in Fault if fault.texts.search(str(error))), None)


def fault_error(fault: Fault, text: str, when: str = "", remedy: str = "") -> MlxTuneError:
    """Return the one-line error for a fault that ends a command; `text` is MLX's message.

    `when` says when or where the fault occurred; `remedy` replaces the fault's own remedy.
    """
    what, remedy = f"{fault.meaning} {when}".rstrip(), remedy or fault.remedy
    if fault is Fault.OUT_OF_MEMORY:
        return MemoryLimitError(f"{what}: {remedy}")
    if fault is Fault.MISSING_HEADER:
        remedy = f"{header_remedy(missing_header(text))}, {remedy}"
    return GpuError(f"{what} ({one_line(text)}): {remedy}")
