# Executed in the namespace of python.py when a context without IPython imports it: the usual part of IPython.display.
# The package says that no shell of IPython runs, so that libraries do not look for more of it.

MODULES = "core", "lib", "display", "core.display", "core.display_functions", "lib.display"


def display_spec(name):
    if name == "IPython" or name.partition(".")[2] in MODULES:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, DisplayLoader, is_package=name in ("IPython", "IPython.core", "IPython.lib"))


class DisplayLoader:
    create_module = staticmethod(lambda spec: None)

    @staticmethod
    def exec_module(module):
        if module.__name__ == "IPython":
            vars(module).update(version_info=(9, 0, 0, ""), __version__="9.0.0", get_ipython=lambda: None)
            __import__("IPython.display")
        elif module.__spec__.submodule_search_locations is None:
            vars(module).update(PUBLIC, __all__=list(PUBLIC))


class DisplayObject:
    """Data with a MIME type: given, from a file, or from a URL."""

    mime, mode = None, "r"

    def __init__(self, data=None, url=None, filename=None, metadata=None):
        if data is not None and not isinstance(data, (bytes, bytearray)) and hasattr(data, "__fspath__"):
            data, filename = None, os.fspath(data)
        if isinstance(data, str) and url is None and filename is None:
            if is_address(data):
                data, url = None, data
            elif self.is_name(data):
                data, filename = None, data
        self.data, self.url, self.filename, self.metadata = data, url, filename, dict(metadata or {})
        self.reload()

    def is_name(self, data):
        return os.path.exists(data)

    def reload(self):
        if self.filename is not None:
            with open(self.filename, self.mode, encoding="utf-8" if self.mode == "r" else None) as file:
                self.data = file.read()
        elif self.url is not None:
            from urllib.request import urlopen

            with urlopen(self.url) as answer:
                data = answer.read()
            self.data = data.decode("utf-8", "replace") if self.mode == "r" else data

    def _repr_mimebundle_(self, include=None, exclude=None):
        if self.mime is not None and self.data is not None:
            return {self.mime: self.show()}, {self.mime: self.metadata} if self.metadata else {}

    def show(self):
        return self.data

    def __repr__(self):
        return "<IPython.core.display.%s object>" % type(self).__name__


class TextDisplayObject(DisplayObject):
    pass


class Pretty(TextDisplayObject):
    mime = "text/plain"


class HTML(TextDisplayObject):
    mime = "text/html"

    def _repr_html_(self):
        return self.data

    __html__ = _repr_html_


class Markdown(TextDisplayObject):
    mime = "text/markdown"


class Latex(TextDisplayObject):
    mime = "text/latex"


class Math(Latex):
    def show(self):
        return "$\\displaystyle %s$" % self.data.strip("$")


class SVG(DisplayObject):
    mime = "image/svg+xml"

    def show(self):
        text = self.data.decode() if isinstance(self.data, bytes) else self.data
        return text[max(text.find("<svg"), 0) :]


class JSON(DisplayObject):
    mime = "application/json"

    def __init__(self, data=None, url=None, filename=None, expanded=False, metadata=None, root="root", **more):
        super().__init__(data, url, filename, dict(metadata or {}, expanded=expanded, root=root, **more))

    def show(self):
        return json.loads(self.data) if isinstance(self.data, (str, bytes)) else self.data


class GeoJSON(JSON):
    mime = "application/geo+json"


class Javascript(TextDisplayObject):
    mime = "application/javascript"

    def __init__(self, data=None, url=None, filename=None, lib=None, css=None):
        super().__init__(data, url, filename)


class Image(DisplayObject):
    mode = "rb"
    KINDS = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "gif": "gif", "webp": "webp", "svg": "svg+xml"}

    def __init__(
        self, data=None, url=None, filename=None, format=None, embed=None,
        width=None, height=None, retina=False, unconfined=False, metadata=None, alt=None,
    ):  # fmt: skip
        self.alt, self.embed = alt, embed
        size = {name: value for name, value in (("width", width), ("height", height), ("alt", alt)) if value is not None}
        super().__init__(data, url, filename, dict(metadata or {}, **size))
        data = self.data or b""
        starts = (b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"<", "svg")
        found = [kind for start, kind in starts if isinstance(data, bytes) and data.startswith(start)]
        end = os.path.splitext(self.filename or self.url or "")[1][1:].lower()
        self.format = (format or (found or [end])[0] or "png").lower()
        if self.format not in self.KINDS:
            raise ValueError("cannot show the image format %r" % self.format)
        self.mime = "image/" + self.KINDS[self.format]

    def is_name(self, data):
        return os.path.exists(data) or os.path.splitext(data)[1][1:].lower() in self.KINDS

    def reload(self):
        if self.url is None or self.embed:
            DisplayObject.reload(self)

    def _repr_mimebundle_(self, include=None, exclude=None):
        if self.data is None:
            return {"text/html": element("img", src=self.url, **self.metadata)}
        return super()._repr_mimebundle_()


class Audio(DisplayObject):
    mode, element, options = "rb", "audio", {"controls": "controls"}
    kind = "audio/wav"

    def __init__(self, data=None, filename=None, url=None, embed=None, rate=None, autoplay=False, mimetype=None, **more):
        if rate is not None and not isinstance(data, (str, bytes)) and data is not None:
            data = wave_of(data, rate)
        self.embed, self.autoplay, self.sizes = embed, autoplay, more
        super().__init__(data, url, filename)
        guessed = __import__("mimetypes").guess_type(self.filename or self.url or "")[0]
        self.kind = mimetype or guessed or self.kind

    is_name = staticmethod(lambda data: True)
    reload = Image.reload

    def _repr_mimebundle_(self, include=None, exclude=None):
        src = self.url
        if self.data is not None:
            src = "data:%s;base64,%s" % (self.kind, plain_value("", self.data))
        sizes = {name: self.sizes[name] for name in ("width", "height") if self.sizes.get(name)}
        more = dict(self.options, **sizes, **({"autoplay": "autoplay"} if self.autoplay else {}))
        return {"text/html": element(self.element, src=src, **more) + "</%s>" % self.element}


class Video(Audio):
    element, kind = "video", "video/mp4"


class IFrame:
    def __init__(self, src, width, height, extras=(), **params):
        query = "?" + __import__("urllib.parse").parse.urlencode(params) if params else ""
        self.src, self.width, self.height = src + query, width, height

    def _repr_html_(self):
        more = {"width": self.width, "height": self.height, "frameborder": 0, "allowfullscreen": ""}
        return element("iframe", src=self.src, **more) + "</iframe>"


class YouTubeVideo(IFrame):
    def __init__(self, id, width=400, height=300, **more):
        super().__init__("https://www.youtube.com/embed/" + id, width, height, **more)


class FileLink:
    def __init__(self, path, url_prefix="", **more):
        self.path, self.address = path, url_prefix + str(path)

    def _repr_html_(self):
        return element("a", href=self.address, target="_blank") + "%s</a>" % escape(self.path)

    def __repr__(self):
        return os.path.abspath(self.path)


class Code(TextDisplayObject):
    mime = "text/html"

    def __init__(self, data=None, url=None, filename=None, language=None):
        super().__init__(data, url, filename)

    def show(self):
        return "<pre>%s</pre>" % escape(self.data)

    def __repr__(self):
        return self.data


def is_address(data):
    return data.startswith(("http://", "https://"))


def escape(text):
    return __import__("html").escape(str(text))


def element(name, **attributes):
    return "<%s%s>" % (name, "".join(' %s="%s"' % (key, escape(value)) for key, value in attributes.items()))


def wave_of(data, rate):
    """Samples, or a list of them for each channel, as a WAV file; the loudest sample takes the whole range."""
    import array
    import wave

    rows = data.tolist() if hasattr(data, "tolist") else list(data)
    rows = rows if rows and isinstance(rows[0], (list, tuple)) else [rows]
    most = max((abs(value) for row in rows for value in row), default=0) or 1
    samples = array.array("h", (int(value / most * 32767) for values in zip(*rows) for value in values))
    if sys.byteorder == "big":
        samples.byteswap()
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((len(rows), 2, int(rate), 0, "NONE", ""))
        out.writeframes(samples.tobytes())
    return file.getvalue()


def publish_display_data(data, metadata=None, *, transient=None, update=False, **ignored):
    display(data, raw=True, metadata=metadata, display_id=(transient or {}).get("display_id"), update=update)


def shows(mime, kind):
    def show(*objects, raw=False, metadata=None):
        for obj in objects:
            display({mime: obj} if raw else obj if hasattr(type(obj), "_repr_mimebundle_") else kind(obj), raw=raw)

    return show


def ignore(*args, **options):
    """What only figures of IPython's shell need."""


KINDS = Pretty, HTML, Markdown, Latex, Math, SVG, JSON, GeoJSON, Javascript, Image, Audio, Video
PUBLIC = {kind.__name__: kind for kind in KINDS + (IFrame, YouTubeVideo, FileLink, Code, DisplayObject, TextDisplayObject)}
FUNCTIONS = display, update_display, clear_output, publish_display_data, DisplayHandle
PUBLIC.update({function.__name__: function for function in FUNCTIONS})
PUBLIC.update({"display_" + kind.__name__.lower(): shows(kind.mime, kind) for kind in KINDS if kind.mime})
PUBLIC.update(set_matplotlib_formats=ignore, set_matplotlib_close=ignore)
