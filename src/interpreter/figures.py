# Executed in the namespace of python.py when matplotlib.pyplot or PIL.ImageShow is imported: shows figures as pictures when
# the code calls plt.show(), and those that are left at the end of an execution; and images when it calls their show().


def pictures_spec(name, path):
    """The module's spec; once it is loaded, what it shows is a display."""
    use = use_viewer
    if name == "matplotlib.pyplot":
        use = use_figures
        choose_backend()
    spec = sys.modules["_frozen_importlib_external"].PathFinder.find_spec(name, path)
    if spec is None:
        return None
    load = spec.loader.exec_module

    def exec_module(module):
        load(module)
        use(module)

    spec.loader.exec_module = exec_module
    return spec


def use_viewer(module):
    class Viewer(module.Viewer):
        def show_image(self, image, **options):
            send_bundle("display", *S.make_bundle(image))
            return 1

    module.register(Viewer, -1)  # before those that start a program


def choose_backend():
    import matplotlib

    if not isinstance(dict.get(matplotlib.rcParams, "backend"), str):  # nobody chose one: never open a window
        matplotlib.use("agg")


def use_figures(module):
    is_first, S.pyplot, module.show = S.pyplot is None, module, show_figures
    if not is_first:  # it was loaded again
        return
    S.formatters.append((is_figure, "image/png", figure_png))
    if hasattr(S, "shell"):
        formatter = S.shell.display_formatter
        formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", figure_png)
        formatter.format = closing(formatter.format)
    S.hooks += (show_figures,)


def closing(show):
    """IPython's format(), which closes figures too where `%matplotlib inline` has replaced figure_png()."""

    def format_and_close(obj, *args, **options):
        bundle = show(obj, *args, **options)
        if is_figure(type(obj)):
            S.pyplot.close(obj)
        return bundle

    return format_and_close


def is_figure(kind):
    return any(base.__module__ == "matplotlib.figure" and base.__name__ == "Figure" for base in kind.__mro__)


def figure_png(figure):
    """The picture. A figure that was the result or displayed is not shown again at the end."""
    picture = io.BytesIO()
    try:
        figure.canvas.print_figure(
            picture, format="png", bbox_inches="tight", dpi=figure.dpi, facecolor=figure.get_facecolor()
        )
    finally:
        S.pyplot.close(figure)
    return picture.getvalue()


def show_figures(*args, **options):
    """Shows and closes all open figures."""
    if S.child:
        return
    for number in S.pyplot.get_fignums():
        figure = S.pyplot.figure(number)
        send_bundle("display", *S.make_bundle(figure))
        S.pyplot.close(figure)
