# Executed in the namespace of python.py at the first bundle of an execution with `values`: adds what the object holds.
# Lists and dicts give JSON, tables of pandas `e2b/data`, figures of matplotlib `e2b/chart`.
#
# Clients expect of a chart what the package e2b-charts finds in the figure. So it is found in the same places, and bars get
# the tick labels in their order, also where these are numbers. But what lies is told from what stands by more than equal
# lengths, all outliers count, and boxes that are drawn as lines (without `patch_artist`) are boxes too.

MAX_VALUES = 100_000  # of a bundle; a text counts as one more for each 40 characters. What has more adds nothing
MAX_INNER = 100  # lists in lists


class Plain:
    """Makes values JSON, as long as they are not too many."""

    left = MAX_VALUES

    def spend(self, value):
        self.left -= 1 + (len(value) // 40 if isinstance(value, str) else 0)
        if self.left < 0:
            raise ValueError("too many values")

    def exact(self, value, depth=0):
        """Lists and dicts as JSON has them; ValueError for what it cannot hold as it is."""
        self.spend(value)
        kind = type(value)
        if kind in (list, tuple) and depth < MAX_INNER:
            return [self.exact(inner, depth + 1) for inner in value]
        if kind is dict and depth < MAX_INNER:
            keys = [self.exact(key, MAX_INNER) for key in value]
            keys = [key if type(key) is str else encode(key).decode() for key in keys]
            return dict(zip(keys, [self.exact(inner, depth + 1) for inner in value.values()]))
        if kind is int and value.bit_length() < 64 or kind is float and value - value == 0:
            return value
        if kind in (str, bool, type(None)):
            return value
        raise ValueError("not JSON")

    def cell(self, value):
        """What a table or a chart holds: dates in ISO 8601, what is missing or infinite as null."""
        kind = type(value).__name__
        if kind == "datetime64":
            value = str(value.astype("datetime64[s]")) if value == value else None
        elif hasattr(value, "tolist"):
            value = value.tolist()
        self.spend(value)
        if value is None or kind in ("NaTType", "NAType"):
            return None
        if isinstance(value, str) or isinstance(value, int) and value.bit_length() < 64:
            return value
        if isinstance(value, float):
            return value if value - value == 0 else None
        if isinstance(value, dict):
            return {self.cell(str(key)): self.cell(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.cell(inner) for inner in value]
        if isinstance(value, int) or kind in ("Decimal", "Fraction"):
            return self.cell(float(value))
        return self.cell(value.isoformat() if hasattr(value, "isoformat") else str(value))

    def numbers(self, values):
        """Coordinates: floats, but the text of categories and dates."""
        return [float(value) if isinstance(value, int) else value for value in map(self.cell, values)]

    def rounded(self, values):
        """Without the noise in the last digits: with more places the smaller a number is, and all before the point."""
        from decimal import Context, Decimal

        numbers = [(number, number.adjusted()) for number in map(Decimal, map(str, self.numbers(values)))]
        return [float(Context(prec=max(size + 1, 8 - size, 1)).plus(number)) for number, size in numbers]


def figure_chart(figure, plain):
    axes = figure.get_axes()
    if any(ax.has_data() for ax in axes):
        charts = [axes_chart(ax, plain) for ax in axes]
        title = figure._suptitle  # matplotlib has a method for its text since 3.8
        several = {"type": "superchart", "title": title.get_text() if title else "", "elements": charts}
        return charts[0] if len(charts) == 1 else several


def axes_chart(ax, plain):
    from matplotlib import collections, lines, patches, text

    parts = [part for part in ax._children if not isinstance(part, text.Text)]
    others = [part for part in parts if not (isinstance(part, lines.Line2D) and is_guide(part))]
    chart = {"type": "unknown", "title": ax.get_title() or None, "elements": []}
    for among, kinds, name, fill in (
        (parts if are_boxes(ax, parts, lines.Line2D) else [None], lines.Line2D, "box_and_whisker", add_boxes),
        (parts, lines.Line2D, "line", add_points),
        (parts, (patches.PathPatch, lines.Line2D), "box_and_whisker", add_boxes),
        (others, collections.PathCollection, "scatter", add_points),
        (others, patches.Wedge, "pie", add_wedges),
        (others, patches.Rectangle, "bar", add_bars),
    ):
        if all(isinstance(part, kinds) for part in among):
            chart["type"] = name
            fill(ax, chart, plain)
            break
    return chart


def is_guide(line):
    """Whether it goes from one point straight across or up to another."""
    if len(line.get_xdata()) == len(line.get_ydata()) == 2:
        (x1, x2), (y1, y2) = line.get_xdata(), line.get_ydata()
        return bool(x1 == x2 or y1 == y2)


def is_outline(line):
    """Whether it goes around a box, which may have notches."""
    xs, ys = list(line.get_xdata()), list(line.get_ydata())
    return len(xs) == len(ys) and len(xs) in (5, 11) and (xs[0], ys[0]) == (xs[-1], ys[-1])


def are_boxes(ax, parts, kind):
    """Whether lines are boxes with what belongs to them: each has a median and two whiskers."""
    if not all(isinstance(part, kind) for part in parts):
        return False
    drawn = [part for part in parts if not is_guide(part) and part.get_linestyle() != "None"]
    if not drawn or not all(map(is_outline, drawn)):
        return False
    wanted = {"min", "median", "max"}
    return any(all(wanted <= set(box) for box in read_boxes(ax, lie, Plain())) for lie in (True, False))


def add_labels(ax, chart, lie=False):
    """The axes' labels. Those of bars and boxes that lie change places."""
    for name, axis in zip("yx" if lie else "xy", (ax.xaxis, ax.yaxis)):
        label = axis.get_label_text() or None
        unit = __import__("re").search(r"\s\((.*?)\)|\[(.*?)\]", label or "")
        chart.update({name + "_label": label, name + "_unit": unit and (unit[1] or unit[2])})


def tick_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def name_of(artist, prefix, word):
    """Its label; `word` and the number if matplotlib made it up."""
    label = str(artist.get_label())
    return "%s %s" % (word, label[len(prefix) :]) if label.startswith(prefix) else label


def add_points(ax, chart, plain):
    add_labels(ax, chart)
    for name, axis in ("x", ax.xaxis), ("y", ax.yaxis):
        labels, ticks, scale = tick_labels(axis), list(axis.get_ticklocs()), axis.get_scale()
        converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
        if type(converter).__name__ == "_SwitchableDateConverter":
            scale = "datetime"
            ticks = [sys.modules["matplotlib.dates"].num2date(tick) for tick in ticks]
        elif scale == "linear" and ticks:
            # Categories are at 0, 1 and so on, and have other labels.
            places = enumerate(zip(ticks, labels))
            if all(isinstance(tick, (int, float)) and tick == n and label != str(n) for n, (tick, label) in places):
                scale = "categorical"
        chart.update({name + "_ticks": plain.numbers(ticks), name + "_tick_labels": labels, name + "_scale": scale})
    drawn = [line for line in ax.get_lines() if not is_guide(line)]
    series = [(name_of(line, "_child", "Line"), line.get_xdata(), line.get_ydata()) for line in drawn]
    series += [(str(dots.get_label()), *dots.get_offsets().T) for dots in ax.collections]
    for label, xs, ys in series:
        points = [list(point) for point in zip(plain.numbers(xs), plain.numbers(ys))]
        chart["elements"].append({"label": label, "points": points})


def add_wedges(ax, chart, plain):
    for wedge in ax.patches:
        angle = plain.rounded([abs(float(wedge.theta2) - float(wedge.theta1))])[0]
        chart["elements"].append({"label": str(wedge.get_label()), "angle": angle, "radius": plain.cell(wedge.r)})


def add_bars(ax, chart, plain):
    lying = [getattr(bars, "orientation", None) == "horizontal" for bars in ax.containers]
    add_labels(ax, chart, any(lying))
    for bars, lies in zip(ax.containers, lying):
        group = name_of(bars, "_container", "Group")
        lengths = plain.numbers(bar.get_width() if lies else bar.get_height() for bar in bars)
        for label, length in zip(tick_labels(ax.yaxis if lies else ax.xaxis), lengths):
            chart["elements"].append({"label": label, "value": length, "group": group})


def add_boxes(ax, chart, plain):
    for lie in True, False:
        boxes = read_boxes(ax, lie, plain)
        if all("median" in box for box in boxes):
            break
    else:
        raise ValueError("shapes that are no boxes")
    add_labels(ax, chart, lie)
    for box in boxes:
        del box["span"]
        chart["elements"].append(dict({"min": box["first_quartile"], "max": box["third_quartile"]}, **box))


def read_boxes(ax, lie, plain):
    """What the boxes and the lines around them say. Without medians if this takes them to `lie` and they stand."""
    boxes, turn = [], -1 if lie else 1
    shapes = [patch.get_path().vertices.T for patch in ax.patches]
    shapes = shapes or [(line.get_xdata(), line.get_ydata()) for line in ax.lines if is_outline(line)]
    labels = tick_labels(ax.yaxis if lie else ax.xaxis) + [""] * len(shapes)
    for label, shape in zip(labels, shapes):
        across, along = [plain.rounded(side) for side in shape[::turn]]
        box = {"label": label, "first_quartile": min(along), "third_quartile": max(along), "outliers": []}
        boxes.append(dict(box, span=(min(across), max(across))))
    for line in ax.lines:
        if is_outline(line) and not ax.patches:
            continue
        across, along = [plain.rounded(side) for side in (line.get_xdata(), line.get_ydata())[::turn]]
        inside = [box for box in boxes if across and box["span"][0] <= min(across) and max(across) <= box["span"][1]]
        if inside:
            box, low, high = inside[0], min(along), max(along)
            if line.get_linestyle() == "None":
                box["outliers"] += along
            elif low == high and across[0] < across[-1] and box["first_quartile"] <= low <= box["third_quartile"]:
                box["median"] = low  # after the caps of a whisker of no length
            elif high == box["first_quartile"]:
                box["min"] = low
            elif low == box["third_quartile"]:
                box["max"] = high
    return boxes


def add_values(obj, data):
    """Takes the place of the function that loads this file."""
    kind, plain = type(obj), Plain()
    try:
        bases = [(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__]
        if kind in (list, dict):
            mime, value = "application/json", plain.exact(obj)
        elif ("pandas", "DataFrame") in bases and obj.size <= MAX_VALUES:
            columns = enumerate(obj.columns)
            mime, value = "e2b/data", {plain.cell(str(name)): plain.cell(obj.iloc[:, n]) for n, name in columns}
        elif ("matplotlib", "Figure") in bases:
            mime, value = "e2b/chart", figure_chart(obj, plain)
        else:
            return
    except Exception:  # in the object's own code, or there is too much of it
        return
    if value is not None:
        data.setdefault(mime, value)
