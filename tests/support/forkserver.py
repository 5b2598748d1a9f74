"""A Python that has imported the libraries once, and forks where a program would start Python anew.

Importing PyTorch and transformers costs seconds of every program that a test starts, often more than what the program
does then, and the project's own modules half a second. So the tests start one interpreter
(`python tests/support/forkserver.py DESCRIPTOR`) that imports them all and waits. Whoever starts `sys.executable` by
`subprocess` or `multiprocessing` gets a fork of it instead, at the very call that would have made the process
(`fork_exec`): pipes, exit statuses, signals, process ids and parents are the real ones. xdist's test processes are such
forks as well. Only the interpreter's start is left out:

- the process in between ends at once, and its child falls to whoever asked, who is its subreaper for that moment;
- the program has the arguments, environment, folder, descriptors and session that were asked for, and ignores and
  blocks the signals that its parent does;
- its `__main__`, its standard streams and the way it ends are those of any Python, but that modules are not taken
  apart at the end;
- before it begins it forks a server of its own, so that the processes that it starts are as new as itself is.

An interpreter of its own gets who asks for it (`fresh`), whose environment differs in what libraries read when they
are imported (`_READ_AT_IMPORT`), and who gives other options than -u, -c, -m and the server's own. Two things differ:
all programs of a server hash strings with one seed, which is not that of the tests; and modules are there before a
program imports them. Those of the project are not where it works in another folder, as in a copy.
"""

import _posixsubprocess
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.machinery
import inspect
import io
import itertools
import os
import pickle
import random
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Iterator, Sequence

# What the project's programs and tests import sooner or later.
LIBRARIES = (
    *("numpy", "torch", "torch._dynamo", "torch.utils.data", "torch.distributed.launcher.api"),
    *("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.numa.binding"),
    *("transformers", "transformers.models.auto.auto_factory", "transformers.models.llama.modeling_llama"),
    *("transformers.models.bert.modeling_bert", "tokenizers", "safetensors.torch", "pydantic", "yaml", "psutil"),
    *("matplotlib.backends.backend_agg", "matplotlib.figure", "scipy.stats", "tqdm", "requests", "jsonschema"),
    *("pytest", "hypothesis"),
)
# The project's entry points, and what they import when they need it.
OURS = (
    *(
        "run",
        "cluster",
        "fabrics.models.continuations",
        "fabrics.data.dataset_loader",
        "training_logs.recording.recorder",
    ),
    *(
        "utils.distributed.attempts",
        "utils.distributed.process_group",
        "utils.config.resume",
        "training_logs.showing.run_data",
        "tests.support.docstrings",
    ),
)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_READ_AT_IMPORT = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "HOME", "XDG_", "OMP_", "MKL_", "KMP_", "OPENBLAS_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "MPL"),
)
# By process groups, where torchrun sets it, and by agents; and what scikit-learn sets for Intel's threads, when a test
# imports it.
_READ_LATER = {
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "KMP_DUPLICATE_LIB_OK"),
    "KMP_INIT_AT_FORK",
}
# The end of fork_exec's arguments where nobody asks for another group, user or mask: before Python 3.11, and since.
_NOTHING_SPECIAL = ((None, None, None, -1, None), (-1, None, None, None, -1, None, True))
_SET_NAME, _SET_CHILD_SUBREAPER = 15, 36  # of prctl
_COLLAPSE, _HUGE_BYTES = 25, 2**21  # of madvise
NAME = "forkserver"
_libc = ctypes.CDLL(None, use_errno=True)


def _send(channel: socket.socket, value: object, descriptors: Sequence[int] = ()) -> None:
    data = pickle.dumps(value)
    socket.send_fds(channel, [struct.pack("!Q", len(data))], descriptors)
    channel.sendall(data)


def _receive(channel: socket.socket) -> tuple[object, list[int]]:
    """What was sent, and its descriptors; EOFError where the other side has ended."""
    data, descriptors, _, _ = socket.recv_fds(channel, 8, 250)
    if len(data) < 8:  # the other side sends it at once
        raise EOFError
    left, parts = struct.unpack("!Q", data)[0], []
    while left:
        parts.append(channel.recv(left))
        if not parts[-1]:
            raise EOFError
        left -= len(parts[-1])
    return pickle.loads(b"".join(parts)), descriptors


# Who asks


class ForkServer:
    """The server of this process, as its side sees it.

    Args:
        channel: to a server that is there already; None: it is started when it is first asked.

    Attributes:
        fresh: whether everybody gets an interpreter of its own.
        refuse: called before a Python is started; what it raises reaches whoever wanted one.
    """

    def __init__(self, channel: socket.socket | None = None, environment: dict[bytes, bytes] | None = None):
        self._channel, self._environment = channel, environment or dict(os.environb)
        self._lock, self._errors = threading.Lock(), None
        self._original = _posixsubprocess.fork_exec
        self.fresh, self.refuse = False, lambda: None

    def install(self) -> "ForkServer":
        """Be what subprocess and multiprocessing call, unless there is one: a fork was given its own."""
        if inspect.ismethod(self._original):
            return self._original.__self__
        _posixsubprocess.fork_exec = self._fork_exec
        if hasattr(subprocess, "_fork_exec"):  # its name since Python 3.11
            subprocess._fork_exec = self._fork_exec
        return self

    def _fork_exec(self, arguments, executables, close, keep, folder, environment, *more) -> int:
        def start_anew() -> int:
            return self._original(arguments, executables, close, keep, folder, environment, *more)

        if os.fsencode(executables[0]) != os.fsencode(sys.executable):
            return start_anew()
        self.refuse()
        words = [os.fsdecode(argument) for argument in arguments]
        variables = dict(item.split(b"=", 1) for item in (_environment() if environment is None else environment))
        stdin, _, _, stdout, _, stderr, _, errors, _, session, *special = more
        if (
            self.fresh
            or not close
            or tuple(special) not in _NOTHING_SPECIAL
            or not _is_program(words[1:])
            or _differ(variables, self._environment)
        ):
            return start_anew()
        streams = {number: end if end >= 0 else number for number, end in enumerate((stdin, stdout, stderr))}
        descriptors = streams | {number: number for number in keep if number != errors}
        program = {
            "arguments": words,
            "environment": variables,
            "folder": os.getcwd() if folder is None else os.fsdecode(folder),
            "numbers": list(descriptors),
            "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "session": bool(session),
        }
        with self._lock:
            return self._ask(program, list(descriptors.values()))

    def _ask(self, program: dict, descriptors: list[int]) -> int:
        """The process id of a new child of this process."""
        if self._channel is None:
            self.start()
        _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            _send(self._channel, program, descriptors)
            return _receive(self._channel)[0]
        except (EOFError, ConnectionError):
            said = "" if self._errors is None else os.pread(self._errors.fileno(), 10_000, 0).decode()
            raise RuntimeError(f"the fork server has ended\n{said}") from None
        finally:
            _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def start(self, few: bool = False) -> None:
        """Start it, and do not wait for what it imports; few: it has few programs to start, and need not prepare."""
        self._channel, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the server)
        own = subprocess._args_from_interpreter_flags()
        command = [sys.executable, *own, os.path.abspath(__file__), str(theirs.fileno()), *(["few"] if few else [])]
        fresh, self.fresh = self.fresh, True
        try:
            self._server = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
            )
        finally:
            self.fresh = fresh
        theirs.close()


def _environment() -> Iterator[bytes]:
    """That of this process, which libraries change behind the back of `os.environ`."""
    return itertools.takewhile(bool, ctypes.POINTER(ctypes.c_char_p).in_dll(_libc, "environ"))


def _without_own_options(arguments: list[str]) -> list[str]:
    """Without the options that this interpreter has too, which `multiprocessing` hands on, as it does -B."""
    own = subprocess._args_from_interpreter_flags()
    return arguments[len(own) :] if arguments[: len(own)] == own else arguments


def _is_program(arguments: list[str]) -> bool:
    """Whether a fork can be what an interpreter with these arguments would be."""
    arguments = _without_own_options(arguments)
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if arguments and arguments[0] in ("-c", "-m"):
        return len(arguments) > 1
    return bool(arguments) and not arguments[0].startswith("-")


def _differ(environment: dict[bytes, bytes], other: dict[bytes, bytes]) -> bool:
    changed = {os.fsdecode(name) for name, _ in environment.items() ^ other.items()}
    return any(name.startswith(_READ_AT_IMPORT) for name in changed - _READ_LATER)


# The server


def _serve(channel: socket.socket) -> tuple[dict, list[int]]:
    """Fork what is asked for until nobody can ask any more; returns in the forks alone: what they are to be."""
    while True:
        try:
            program, descriptors = _receive(channel)
        except (EOFError, ConnectionError):
            os._exit(0)
        (read, write), (wait, go) = os.pipe(), os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(write, struct.pack("!Q", child))
                os._exit(0)
            channel.close()
            os.close(go)
            os.read(wait, 1)  # returns when the process in between has ended and the server goes on
            for descriptor in (read, write, wait):
                os.close(descriptor)
            return program, descriptors
        (child,) = struct.unpack("!Q", os.read(read, 8))
        os.waitpid(between, 0)
        for descriptor in (read, write, wait, go, *descriptors):
            os.close(descriptor)
        _send(channel, child)


def _prepare(program: dict, descriptors: list[int]) -> None:
    """Give this fork what its program was asked to have."""
    numbers = program["numbers"]
    above = max(2, *numbers, *descriptors) + 1  # out of the way of the numbers that they shall have
    for number, descriptor in zip(numbers, [_moved(descriptor, above) for descriptor in descriptors], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in program["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, program["blocked"])
    if program["session"]:
        os.setsid()
    os.environb.clear()
    os.environb.update(program["environment"])
    os.chdir(program["folder"])
    if os.path.realpath(program["folder"]) != os.path.realpath(_ROOT):
        for name in _ours():
            del sys.modules[name]
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].seed()


def _ours() -> list[str]:
    """The names of the modules that are there and lie in the project."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    inside = {name for name, file in files.items() if file.startswith(_ROOT + os.sep) and "site-packages" not in file}
    # Folders without an __init__.py have no file of their own.
    folders = {".".join(name.split(".")[:parts]) for name in inside for parts in range(1, name.count(".") + 1)}
    return sorted((inside | folders) - {"__main__"})


def _moved(descriptor: int, above: int) -> int:
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(descriptor)
    return copy


def _become(arguments: list[str]) -> None:
    """Be the program, as `__main__`; what it raises ends this interpreter as it would end any other."""
    sys.orig_argv = arguments
    arguments = _without_own_options(arguments[1:])
    unbuffered = arguments[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    arguments = arguments[arguments[0] == "-u" :]
    sys.stdin = sys.__stdin__ = _stream(0, "r", sys.stdin, unbuffered)
    sys.stdout = sys.__stdout__ = _stream(1, "w", sys.stdout, unbuffered)
    sys.stderr.reconfigure(write_through=unbuffered)  # the same object: handlers of libraries may have it
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __annotations__={}, __builtins__=sys.modules["builtins"], __loader__=importlib.machinery.BuiltinImporter
    )
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[1])
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = arguments
        path = os.path.abspath(arguments[0])
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
        sys.path.insert(0, os.path.dirname(os.path.realpath(arguments[0])))
        with open(main.__file__, "rb") as file:
            source = file.read()
        exec(compile(source, main.__file__, "exec"), main.__dict__)


def _stream(number: int, mode: str, like: io.TextIOWrapper, unbuffered: bool) -> io.TextIOWrapper:
    """The standard stream that an interpreter would make of what its descriptor is now."""
    raw = unbuffered and mode == "w"
    binary = open(number, mode + "b", 0 if raw else -1, closefd=False)  # noqa: SIM115
    (binary if raw else binary.raw).name = like.name
    stream = io.TextIOWrapper(
        binary, like.encoding, like.errors, "\n", line_buffering=os.isatty(number), write_through=unbuffered
    )
    stream.mode = mode
    return stream


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    environment = dict(os.environb)
    del sys.path[0]  # where this file is
    sys.path.insert(0, _ROOT)
    # transformers imports it where there is one, for seconds and with threads of its own, and nobody here needs that.
    sys.modules["sklearn"] = None
    gc.disable()  # all of it stays
    for module in (*LIBRARIES, *OURS):
        importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) > 1:
            sys.exit(f"importing {module} starts a thread, which forks would not have")
    del sys.modules["sklearn"]
    del sys.path[0]
    for finalizer in weakref.finalize._registry:  # of what was imported, which is not taken apart at the end
        finalizer.atexit = False
    gc.enable()
    gc.collect()
    gc.freeze()
    if "few" not in sys.argv[2:]:
        use_huge_pages()
    _libc.prctl(_SET_NAME, NAME.encode(), 0, 0, 0)
    program, descriptors = _serve(channel)
    while True:
        channel, other = socket.socketpair()
        if os.fork():
            other.close()
            break
        # This is the server of the program, whose pipes would stay open with it.
        channel.close()
        for descriptor in descriptors:
            os.close(descriptor)
        program, descriptors = _serve(other)
    _libc.prctl(_SET_NAME, b"python", 0, 0, 0)
    ForkServer(channel, environment).install()
    _prepare(program, descriptors)
    try:
        _become(program["arguments"])
        status = 0
    except SystemExit as wanted:
        status = wanted.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    # By now what its frames held is gone. KeyboardInterrupt ends this interpreter as it would end any.
    _leave(status)


def use_huge_pages() -> None:
    """Join the pages of this process's memory into huge ones: what is there is found faster, and a fork and its end
    cost less than half as much.

    Where the system cannot, as Linux before 6.1, nothing changes.
    """
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for addresses, permissions, *_, inode in (mapping[:5] for mapping in mappings):
        if "w" in permissions and inode == "0":  # of no file
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
            if start < end:
                _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _COLLAPSE)


def _leave(status: int) -> None:
    """End as an interpreter does, but for taking apart what was imported, which costs a third of a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; closed
            stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
