"""Notebooks run in real kernels, each a fork of one process that has imported what we use of others, and nothing of ours.

A fresh kernel pays seconds for PyTorch, pandas and Altair before its first line. A fork has them at once; else it is as empty as a fresh one.
Run as a script this is that process: for each folder on its input it forks a kernel there, says its process id, and its exit code once it has ended."""
import contextlib, gc, importlib, os, select, signal, subprocess, sys
from tempfile import TemporaryDirectory

PRELOADED = """altair anywidget fastcore.basics fastcore.test ipykernel.ipkernel ipykernel.kernelapp numpy pandas PIL.Image pyarrow.parquet pydantic
safetensors.torch scipy.stats sklearn.linear_model torch torch._dynamo torch.fx torch.utils.flop_counter tqdm.auto typer vl_convert""".split()


class Kernels:
    "The process that kernels are forked from."
    def __init__(self): self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, cells, folder, timeout=300):
        "Run pieces of code in turn in a kernel of their own, whose working folder is `folder`; the first that fails ends it with an AssertionError."
        from jupyter_client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file
        with TemporaryDirectory() as place:  # a short path: that of a socket may have a hundred characters
            write_connection_file(file := f"{place}/kernel.json", transport="ipc", ip=f"{place}/kernel")
            client = BlockingKernelClient(connection_file=file)
            client.load_connection_file()
            print(file, folder, sep="\n", file=self.process.stdin, flush=True)
            pid = int(self.process.stdout.readline())
            try:
                client.start_channels()
                client.wait_for_ready(timeout=60)
                for cell in cells:
                    reply = client.execute_interactive(cell, allow_stdin=False, timeout=timeout, output_hook=lambda message: None)["content"]
                    assert reply["status"] == "ok", "\n".join([cell, *reply.get("traceback", ["was aborted"])])
                client.shutdown()
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                raise
            finally:
                client.stop_channels()
                code = int(self.process.stdout.readline())
        assert code == 0, f"the kernel ended with exit code {code}"

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve():
    "Fork one kernel after the other."
    sys.path.pop(0)  # the folder of this file, which a kernel does not know
    for name in PRELOADED: importlib.import_module(name)
    gc.freeze()
    while file := sys.stdin.readline().rstrip("\n"):
        folder = sys.stdin.readline().rstrip("\n")
        if not (pid := os.fork()): start(file, folder)
        print(pid, flush=True)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if select.select([sys.stdin], [], [], 0.05)[0]: os.kill(pid, signal.SIGKILL)  # nobody waits for it any more
        print(os.waitstatus_to_exitcode(ended[1]), flush=True)


def start(file, folder):
    "Become a kernel, as `python -m ipykernel_launcher` does."
    from ipykernel.kernelapp import IPKernelApp
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1): os.dup2(nothing, stream)
    os.chdir(folder)
    sys.path.insert(0, "")
    with contextlib.suppress(SystemExit): IPKernelApp.launch_instance(argv=["-f", file, "--HistoryManager.hist_file=:memory:"])
    os._exit(0)


if __name__ == "__main__": serve()
