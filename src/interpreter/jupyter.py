# The back end of Jupyter kernels, executed in the namespace of python.py: a kernel of this machine runs the code, and
# this process passes on what it says. They speak over unix sockets, because a sandbox may not bind TCP ports.
from time import monotonic as now

LOST_AFTER = 5  # seconds of silence after one half of the end of an execution


def start_jupyter(name):
    """Starts the kernel and returns what runs in it."""
    import re
    import shutil
    import tempfile
    import threading

    try:
        import zmq
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager
    except ImportError:
        refuse(name, "python3 cannot import jupyter_client; install it and the kernel")
    names = sorted(KernelSpecManager().find_kernel_specs())
    if name not in names:
        refuse(name, "there is no kernel of this name; there is " + (", ".join(names) or "none"))
    folder = tempfile.mkdtemp(prefix="sbx-")
    try:
        if len(os.fsencode(folder)) > 99:  # a socket's path has at most 107 bytes
            raise OSError("TMPDIR is too long for the path of a socket: " + folder)
        manager = KernelManager(kernel_name=name, transport="ipc", connection_file=os.path.join(folder, "k"))
        # The kernel has its own session. It takes signals as any program does.
        mask = sigmask(_signal.SIG_UNBLOCK, BLOCKED)
        try:
            manager.start_kernel(stdin=0, stdout=1, stderr=2)
        finally:
            sigmask(_signal.SIG_SETMASK, mask)
        S.manager, S.client, S.kernel_ended = manager, manager.blocking_client(), False
        threading.Thread(target=watch_kernel, args=(manager.provisioner.process,), daemon=True).start()
        S.client.context.setsockopt(zmq.RCVHWM, 0)  # a kernel throws away what does not fit
        # Writable when they are connected: nobody asks them before an execution does.
        S.client.context.setsockopt(zmq.IMMEDIATE, 1)
        late = S.client.stdin_channel.socket, S.client.control_channel.socket
        S.client.context.setsockopt(zmq.IMMEDIATE, 0)
        S.client.start_channels(hb=False)
        S.client.wait_for_ready(timeout=50)
        for channel in late:
            channel.poll(2000, zmq.POLLOUT)
        info = S.client.kernel_info(reply=True, timeout=5)["content"].get("language_info") or {}
    finally:
        shutil.rmtree(folder, True)  # all sockets are connected: so nothing is left, however this process ends
    S.poller = zmq.Poller()
    for channel in (S.client.iopub_channel, S.client.shell_channel, S.client.stdin_channel):
        S.poller.register(channel.socket, zmq.POLLIN)
    S.colors = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
    S.execute, S.format_error = execute_jupyter, format_jupyter
    return "%s %s" % (info.get("name", name), info.get("version", ""))


def refuse(name, why):
    write_frame({"type": "failed", "error": "cannot start the kernel %s: %s" % (name, why)})
    os._exit(70)


def watch_kernel(process):
    """Ends this process as the kernel ends, once what the kernel has said before is passed on."""
    status = process.wait()
    S.kernel_ended = True
    for _ in range(20):  # an execution passes on the rest, and ends this process before
        if not S.running:
            break
        select.select((), (), (), 0.1)
    end_as(status)


def end_as(status):
    """Ends this process as another has ended."""
    if status < 0:
        if get_ident() == MAIN_THREAD and -status != _signal.SIGKILL:
            _signal.signal(-status, _signal.SIG_DFL)
        sigmask(_signal.SIG_UNBLOCK, (-status,))
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def interrupt_kernel():
    if S.manager.kernel_spec.interrupt_mode == "message":
        S.client.control_channel.send(S.client.session.msg("interrupt_request", {}))
    else:
        S.manager.interrupt_kernel()


def execute_jupyter(code):
    S.result = S.failure = None
    # An interrupt goes to the kernel, and is never raised here: it would tear a message in two.
    S.hold += 1
    hold = S.hold
    wake, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = _signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    S.poller.register(wake, 1)
    try:
        number = S.client.execute(code, allow_stdin=S.may_ask or S.has_stdin, stop_on_error=False)
        seen, done, heard = set(), set(), 0.0
        # Both say that it is over. One that was lost must not be waited for.
        while len(done) < 2 and not (done and now() - heard > LOST_AFTER):
            try:
                ready = dict(S.poller.poll(200))
                if wake in ready:
                    os_read(wake, 4096)
                if S.late and seen:  # an idle kernel ignores an interrupt
                    S.late = False
                    interrupt_kernel()
                if not ready and S.kernel_ended:
                    settle()
                    end_as(S.manager.provisioner.process.returncode)
                for channel in (S.client.iopub_channel, S.client.stdin_channel, S.client.shell_channel):
                    for _ in range(100):  # and look at the others
                        if S.late and seen or not channel.socket.poll(0):
                            break
                        seen |= pass_on(receive(channel), number)
                        done, heard = seen - {"begun"}, now()
            except KeyboardInterrupt:  # while input was asked for
                S.hold, S.late = hold, True
    finally:
        S.poller.unregister(wake)
        _signal.set_wakeup_fd(before)
        os.close(wake)
        os.close(wakes)
        S.late = False  # the kernel is idle
        S.hold -= 1
    if S.result is not None:
        send_bundle("result", *S.result)
    if S.failure is not None:
        name, value, lines = S.failure
        if name == "SystemExit":
            raise SystemExit(int(value) if value.isdigit() else value or None)
        error = type(name, (Exception,), {})(value)
        error.lines = lines
        raise error


def receive(channel):
    """The next message; None if it is torn. A kernel that is interrupted between two parts of one adds the next to it."""
    try:
        return channel.get_msg(timeout=0)
    except (ValueError, TypeError):
        return None


def pass_on(message, number):
    """Handles a message of the kernel. Returns whether it tells the begin of the execution, or which half of its end."""
    if message is None:
        return set()
    kind, content = message["header"]["msg_type"], message["content"]
    own = (message["parent_header"] or {}).get("msg_id") == number
    if kind == "stream":  # also that of threads of earlier executions
        stream = S.stderr if content["name"] == "stderr" else S.stdout
        stream.write(content["text"])
        stream.flush()
    elif kind in ("display_data", "update_display_data"):
        display_id = (content.get("transient") or {}).get("display_id")
        more = {} if display_id is None else {"display_id": str(display_id)}
        if kind != "display_data":
            more["update"] = True
        send_bundle("display", without_breaks(content["data"]), content.get("metadata"), **more)
    elif kind == "clear_output":
        clear_output(content.get("wait"))
    elif not own:
        pass
    elif kind == "execute_input":
        return {"begun"}
    elif kind == "execute_result":
        S.result = without_breaks(content["data"]), content.get("metadata")
    elif kind == "error":
        S.failure = content["ename"], content["evalue"], content["traceback"]
    elif kind == "input_request":
        answer_kernel(content)
    elif kind == "execute_reply":
        if content["status"] == "error" and S.failure is None:
            S.failure = content["ename"], content["evalue"], content["traceback"]
        return {"reply"}
    elif kind == "status" and content["execution_state"] == "idle":
        return {"idle"}
    return set()


def without_breaks(data):
    """Pictures in base64 without line ends."""
    is_base64 = lambda mime, value: mime.startswith("image/") and "svg" not in mime and isinstance(value, str)
    return {mime: value.replace("\n", "") if is_base64(mime, value) else value for mime, value in data.items()}


def answer_kernel(question):
    hold, S.hold = S.hold, 0
    try:
        raise_late()
        if S.may_ask:
            line = ask(str(question["prompt"]), bool(question["password"]))
        else:
            S.stdout.write(str(question["prompt"]))
            line = S.stdin.readline()
            line = line[:-1] if line.endswith("\n") else line or None
    finally:
        S.hold = hold
    S.client.input("\x04" if line is None else line)


def format_jupyter(error):
    lines = getattr(error, "lines", None)
    if lines is None:  # of this process
        return format_plain(error)
    return S.colors.sub("", "\n".join(lines)).split("\n")
