# The IPython back end, executed in the namespace of python.py: IPython's shell with the bridge's streams, displays and
# errors. Magics, `_`, formatters and tracebacks are IPython's.

RUNNERS = ("/interactiveshell.py", "/async_helpers.py", "/compilerop.py", "/core/formatters.py")


def start_ipython():
    """Makes the shell and returns the version of IPython."""
    from IPython import __version__
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets import Type
    from traitlets.config import Config

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, source=None, *, transient=None, update=False, **ignored):
            more = {"update": True} if update else {}
            display_id = (transient or {}).get("display_id")
            if display_id is not None:
                more["display_id"] = str(display_id)
            send_bundle("display", data, metadata, **more)

        def clear_output(self, wait=False):
            clear_output(wait)

    class Hook(DisplayHook):
        def write_output_prompt(self):
            pass

        def write_format_data(self, format_dict, md_dict=None):
            S.result = (format_dict, md_dict)

        def finish_displayhook(self):
            pass

    class Shell(InteractiveShell):
        display_pub_class = Type(Publisher)
        displayhook_class = Type(Hook)

        def init_readline(self):
            pass

        def enable_gui(self, gui=None):
            pass

        def enable_matplotlib(self, gui=None):
            """Without the callback that shows figures before the result: show_figures() does it."""
            chosen = super().enable_matplotlib(gui)
            for callback in self.events.callbacks["post_execute"][:]:
                if getattr(callback, "__name__", "") == "flush_figures":
                    self.events.unregister("post_execute", callback)
            return chosen

        def showtraceback(self, exc_tuple=None, *args, **options):
            error = self._get_exc_info(exc_tuple)[1]
            if S.showing:  # of what an object has to show: not the end of the cell
                report(error)
            else:
                S.trace = error  # formatted by format_ipython, where an interrupt can end it

        def showsyntaxerror(self, *args, **options):
            S.trace = sys.exc_info()[1]

        def _format_exception_for_storage(self, *args, **options):
            return None  # it formats every error once more, also one whose text never ends

        def ask_exit(self):
            raise SystemExit

        def system(self, command):
            """`!command`: with the bridge's descriptors, and interrupted as any other code."""
            import subprocess

            command = self.var_expand(command, depth=1)
            status = subprocess.run(" " + command, shell=True, stdin=subprocess.DEVNULL).returncode  # never an option
            self.user_ns["_exit_code"] = status

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.update(
        colors="NoColor" if __version__ < "9" else "nocolor", xmode="Context", cache_size=1000, history_length=0
    )
    sys.modules["warnings"].filterwarnings("ignore", message="To exit: use")
    S.trace = S.result = None
    S.showing = 0
    S.shell = shell = Shell.instance(config=config, user_module=main_module, user_ns=namespace)
    shell.user_ns["exit"] = shell.user_ns["quit"] = sys.modules["builtins"].exit
    shell.display_formatter.active_types = shell.display_formatter.format_types
    shell.display_formatter.format = adding_values(shell.display_formatter.format)
    shell.compile.get_code_name = lambda raw, transformed, number: "<cell %d>" % S.count
    sys.excepthook, sys.displayhook = sys.__excepthook__, sys.__displayhook__
    S.execute, S.format_error, S.make_bundle = execute_ipython, format_ipython, shell.display_formatter.format
    return __version__


def adding_values(show):
    """IPython's format(), which adds values too where nobody has chosen types."""

    def format_with_values(obj, *args, **options):
        S.showing += 1
        try:
            bundle = show(obj, *args, **options)
        finally:
            S.showing -= 1
        if S.values and bundle[0] and not any(args) and not any(options.values()):
            add_values(obj, bundle[0])
        return bundle

    return format_with_values


def execute_ipython(code):
    S.trace = S.result = None
    shell = S.shell
    shell.execution_count = S.count
    execution = None
    try:
        if shell.should_run_async(code, transformed_cell=shell.transform_cell(code)):
            execution = await_value(shell.run_cell_async(code, store_history=True, transformed_cell=shell.transform_cell(code)))
        else:
            execution = shell.run_cell(code, store_history=True)
    finally:
        if S.result is not None and not S.child:
            data, metadata = S.result
            S.result = None
            if execution is not None and execution.success:
                send_bundle("result", data, metadata)
    error = execution.error_before_exec or execution.error_in_exec
    if error is not None:
        raise error
    if S.trace is not None:  # of a callback: not the end of the cell
        S.stderr.write("\n".join(format_ipython(S.trace)) + "\n")


def strip_trace(error, seen):
    """Removes the frames of the bridge, and those of IPython that run a cell, from an error and what caused it."""
    while error is not None and id(error) not in seen:
        seen[id(error)] = error
        kept, step = [], error.__traceback__
        while step is not None:
            name = step.tb_frame.f_code.co_filename
            if name != "<bridge>" and (kept or not name.endswith(RUNNERS)):
                kept.append(step)
            step = step.tb_next
        for frame, after in zip(kept, kept[1:] + [None]):
            frame.tb_next = after
        error.__traceback__ = kept[0] if kept else None
        if error.__cause__ is not None:
            strip_trace(error.__cause__, seen)
        error = error.__context__


def format_ipython(error):
    seen = {}
    strip_trace(error, seen)
    # Where the text of one fails, IPython shows the error of that.
    has_text = all(text_of(error) != NO_TEXT for error in seen.values())
    if isinstance(error, SyntaxError) or error.__traceback__ is None or not has_text:
        return format_plain(error)
    lines = S.shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__, tb_offset=0)
    return "\n".join(lines).split("\n")
