"""Who has which GPU over time, and how a loss goes on: a picture for the terminal, and the same as one HTML file."""

import html
from dataclasses import dataclass, field

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")
COLUMNS, BESIDE = 72, 22  # of the picture in a terminal, and what stands beside them
WIDTH, ROW, LOSS_HEIGHT, LEFT, RIGHT = 960, 22, 180, 90, 30


@dataclass
class Moment:
    """`holders` has the name of a job, or nothing, for each GPU of each node; `loss` is that of the watched job."""

    at_s: float
    holders: dict[str, list[str]]
    loss: float | None = None


@dataclass
class Picture:
    """Grows by a moment at a time.  `gpus` counts those of each node."""

    gpus: dict[str, int]
    moments: list[Moment] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)

    def add(self, at_s, ranks, loss=None):
        """`ranks`: of each job how many GPUs it has on which node, {"job": {"node": 2}}; rows stay with their job."""
        before = self.moments[-1].holders if self.moments else {}
        holders = {node: [""] * count for node, count in self.gpus.items()}
        left = {(job, node): count for job, nodes in ranks.items() for node, count in nodes.items()}
        for keep in (True, False):
            for node, row in holders.items():
                for index in range(len(row)):
                    had = before.get(node, row)[index]
                    wanted = [
                        job for job, there in left if there == node and left[job, there] and (job == had or not keep)
                    ]
                    if not row[index] and wanted:
                        row[index] = wanted[0]
                        left[wanted[0], node] -= 1
        self.jobs += [job for job in ranks if job not in self.jobs]
        self.moments.append(Moment(at_s, holders, loss))

    def note(self, text):
        """What was done to it at this moment."""
        self.notes.append((self.moments[-1].at_s if self.moments else 0.0, text))

    def letter(self, job):
        return LETTERS[self.jobs.index(job) % len(LETTERS)] if job else "."

    def text(self, width):
        """For a terminal of so many columns: a row for each GPU, a letter for each job."""
        every = -(-len(self.moments) // max(1, min(COLUMNS, width - BESIDE))) or 1
        shown, lines = self.moments[::every], []
        for node, count in self.gpus.items():
            for index in range(count):
                row = "".join(self.letter(moment.holders[node][index]) for moment in shown)
                lines.append(f"  {node:>8} gpu{index} {row}")
        lines.append("  " + " " * 14 + _sparkline([moment.loss for moment in shown]) + "  loss")
        lines.append("  " + "   ".join(f"{self.letter(job)} {job}" for job in self.jobs))
        lines += [f"  {at_s:5.0f} s  {text}" for at_s, text in self.notes[-3:]]
        return "\n".join(lines)

    def html(self, title, paragraphs, table):
        """One page that loads nothing; `table` is a list of rows, the first one its head."""
        told = "".join(f"<p>{html.escape(each)}</p>" for each in paragraphs)
        head, *rows = [[html.escape(str(cell)) for cell in row] for row in table]
        cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        heads = "".join(f"<th>{cell}</th>" for cell in head)
        return (
            '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
            f"<title>{html.escape(title)}</title><style>{STYLE}</style>\n<main><h1>{html.escape(title)}</h1>{told}"
            f"<h2>GPUs by job</h2>{self._legend()}{self._rows()}{self._notes()}<h2>Loss</h2>{self._loss()}"
            f"<h2>Changes</h2><table><tr>{heads}</tr>{cells}</table></main></html>\n"
        )

    # Of the page.

    @property
    def _end_s(self):
        return max((moment.at_s for moment in self.moments), default=1.0) or 1.0

    def _x(self, at_s):
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / self._end_s

    def _colour(self, job):
        return COLOURS[self.jobs.index(job) % len(COLOURS)]

    def _legend(self):
        names = (f'<span><i style="background:{self._colour(job)}"></i>{html.escape(job)}</span>' for job in self.jobs)
        return f'<p class="legend">{"".join(names)}<span><i></i>idle</span></p>'

    def _notes(self):
        return f"<ol>{''.join(f'<li>{at_s:.0f} s: {html.escape(text)}</li>' for at_s, text in self.notes)}</ol>"

    def _rows(self):
        parts, y = [], 0
        for node, count in self.gpus.items():
            for index in range(count):
                parts.append(f'<text x="0" y="{y + 15}">{html.escape(node)} gpu{index}</text>')
                parts.append(
                    f'<rect class="idle" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW - 4}"/>'
                )
                for job, begin_s, end_s in self._spans(node, index):
                    x, width = self._x(begin_s), self._x(end_s) - self._x(begin_s)
                    told = f"<title>{html.escape(job)}, {begin_s:.0f} to {end_s:.0f} s</title>"
                    place = f'x="{x:.1f}" y="{y}" width="{max(1.0, width):.1f}" height="{ROW - 4}"'
                    parts.append(f'<rect {place} fill="{self._colour(job)}">{told}</rect>')
                y += ROW
            y += 6
        return self._svg(y + 34, parts + self._axis(y) + self._marks(y))

    def _spans(self, node, index):
        spans = []
        for moment, after in zip(self.moments, [*self.moments[1:], None], strict=True):
            job, end_s = moment.holders[node][index], after.at_s if after else moment.at_s
            if spans and spans[-1][0] == job and spans[-1][2] == moment.at_s:
                spans[-1][2] = end_s
            elif job:
                spans.append([job, moment.at_s, end_s])
        return spans

    def _loss(self):
        points = [(moment.at_s, moment.loss) for moment in self.moments if moment.loss is not None]
        most = max((loss for _, loss in points), default=1.0) or 1.0
        line = " ".join(f"{self._x(at_s):.1f},{LOSS_HEIGHT * (1 - loss / most):.1f}" for at_s, loss in points)
        scale = [f'<text x="0" y="12">{most:.2f}</text><text x="0" y="{LOSS_HEIGHT}">0</text>']
        return self._svg(
            LOSS_HEIGHT + 34,
            [*scale, f'<polyline points="{line}"/>', *self._axis(LOSS_HEIGHT), *self._marks(LOSS_HEIGHT)],
        )

    def _axis(self, y):
        every = next(
            each for each in (5, 10, 20, 30, 60, 120, 300, 600, 3_600) if self._end_s / each <= 12 or each == 3_600
        )
        marks = range(0, int(self._end_s) + 1, every)
        return [f'<text class="time" x="{self._x(at_s):.1f}" y="{y + 14}">{at_s} s</text>' for at_s in marks]

    def _marks(self, height):
        """A dotted line for each note, with its number in the list below the first axis."""
        lines = []
        for number, (at_s, text) in enumerate(self.notes, 1):
            x = f"{self._x(at_s):.1f}"
            lines.append(f'<line x1="{x}" x2="{x}" y1="0" y2="{height + 18}"><title>{html.escape(text)}</title></line>')
            lines.append(f'<text class="mark" x="{x}" y="{height + 30}">{number}</text>')
        return lines

    def _svg(self, height, parts):
        return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; background: Canvas; color: CanvasText }
main { max-width: 1000px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.1rem; margin-top: 2rem }
svg { width: 100%; height: auto; font-size: 12px } svg text { fill: CanvasText; opacity: .75 }
.time, .mark { text-anchor: middle } .mark { font-weight: 600 } .idle { fill: CanvasText; opacity: .06 }
polyline { fill: none; stroke: #4269d0; stroke-width: 2 }
line { stroke: CanvasText; stroke-dasharray: 3 3; opacity: .5 }
.legend span { margin-right: 1.2rem } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
background: color-mix(in srgb, CanvasText 8%, transparent); vertical-align: -.05em }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .8rem .3rem 0;
border-bottom: 1px solid color-mix(in srgb, CanvasText 15%, transparent); vertical-align: top }
"""


def _sparkline(values):
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    low, high = min(known), max(known)
    bars = "▁▂▃▄▅▆▇█"
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else bars[round((value - low) * scale)] for value in values)
