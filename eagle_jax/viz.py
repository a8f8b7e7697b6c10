"""Seeing what was drafted and what was accepted: text in colour, decoding watched round by round, pictures of trees.

Pictures need matplotlib (`pip install "eagle_jax[plots]"`); nothing else here does.

N nodes of one row's tree.
"""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import numpy as np
from rich.text import Text

from eagle_jax import decoding
from eagle_jax.completion import Chunk, Completion
from eagle_jax.generation import BindsDrafter, Job, Options, Prompt, prepare
from eagle_jax.head import Head
from eagle_jax.target import Target
from eagle_jax.text import Reader
from eagle_jax.tree import NO_PARENT, ROOT, Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# --- Text in colour ---------------------------------------------------------------------------------------------------

# What was drafted is underlined, from the third level on also bold: runs show without any colour. The colours go from
# blue to yellow, which every kind of eye tells apart, all with a contrast of 4.5 to black and to white alike.
OWN = ""  # the target's own tokens: the prefill's and the bonus tokens
DRAFTED = (
    "underline #0c74dd",
    "underline #9f4ed9",
    "bold underline #d51ea8",
    "bold underline #d14600",
    "bold underline #a06b00",
)


def style_of(level: int) -> str:
    """The style of a token accepted at this level of its tree; level 0 is the target's own."""
    return DRAFTED[min(level, len(DRAFTED)) - 1] if level else OWN


def legend() -> Text:
    """One line that says what the styles mean."""
    text = Text("the target's own", style=OWN).append("  drafted and accepted, by level: ")
    for level in range(1, len(DRAFTED) + 1):
        text.append(f" {level}{'+' if level == len(DRAFTED) else ''} ", style_of(level))
    return text


def levels_of(completion: Completion) -> list[int]:
    """For each token the level of the tree it was accepted at, 0 for the target's own."""
    levels = [0] + [level for accepted in completion.accepted for level in _round_levels(accepted)]
    return levels[: len(completion.token_ids)]  # the last round may have been cut


def colored(target: Target, completion: Completion) -> Text:
    """The text of a completion, coloured by where each token came from.

    A character whose bytes are spread over tokens has the style of the token that completes it. The plain text is the
    completion's, less the control characters that rich never prints: bell, backspace, vertical tab, form feed, return.
    """
    return Painter(target).add(completion.token_ids, levels_of(completion), completion.text)


class Painter:
    """Colours the chunks of one stream, in their order: `console.print(paint(chunk), end="", soft_wrap=True)`."""

    def __init__(self, target: Target):
        self._reader = Reader(target.tokenizer)
        self._unshown: deque[tuple[int, str]] = deque()  # tokens: the characters that are whole with each, its style
        self._whole = 0  # characters that are whole with the last token
        self._style = OWN  # the last token's
        self._shown = 0  # characters

    def __call__(self, chunk: Chunk) -> Text:
        levels = [0] if chunk.accepted is None else _round_levels(chunk.accepted)
        return self.add(chunk.token_ids, levels[: len(chunk.token_ids)], chunk.text)

    def add(self, token_ids: Sequence[int], levels: Sequence[int], text: str) -> Text:
        """Takes in more tokens; colours the text that comes with them, which may belong to earlier ones in part."""
        for token, level in zip(token_ids, levels, strict=True):
            self._whole += len(self._reader.read([token], last=False))
            self._style = style_of(level)
            self._unshown.append((self._whole, self._style))
        painted, begin = Text(), 0
        while self._unshown:
            whole, style = self._unshown[0]
            end = min(whole - self._shown, len(text))
            if end > begin:
                painted.append(text[begin:end], style)
                begin = end
            if whole - self._shown > len(text):
                break
            self._unshown.popleft()
        # Bytes at the end of a text that never became a character.
        painted.append(text[begin:], self._style)
        self._shown += len(text)
        return painted


def _round_levels(accepted: int) -> list[int]:
    return [*range(1, accepted + 1), 0]


# --- Round by round ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """One round, seen from the host."""

    tree: Tree  # of NumPy arrays [N]
    path: list[int]  # the nodes walked over, the root first
    tokens: list[int]  # the target's choice at each of them, before any cut; the last one is the bonus token
    text: str  # so far, whole characters only
    completion: Completion  # so far; its `finish_reason` means nothing before the last round


def watch(
    target: Target, head: Head | BindsDrafter | None, prompt: Prompt, **options: Unpack[Options]
) -> Iterator[Watched]:
    """Decodes one prompt and yields every round with its tree. Options are `generate`'s, and so is the text."""
    return _watch(prepare(target, head, [prompt], **options))


def _watch(job: Job) -> Iterator[Watched]:
    state, rows = job.start(), job.rows()
    job.look(state, rows, 1)
    while rows[0].running:
        state, seen = decoding.watch_round(job.params, state, program=job.program)
        tree, accepted = jax.device_get(jax.tree.map(lambda rows: rows[0], tuple(seen)))
        job.look(state, rows, 1)
        done = rows[0].completion()
        count = int(accepted.count)
        yield Watched(
            tree=tree,
            path=accepted.path[:count].tolist(),
            tokens=accepted.tokens[:count].tolist(),
            text=done.text,
            completion=done,
        )


# --- Pictures of trees ------------------------------------------------------------------------------------------------

# A tree is laid out in inches, level by level from left to right and a line for each leaf, so that labels cannot meet.
FONT, POINTS = "DejaVu Sans Mono", 9
CHARACTER = 0.602 * POINTS / 72  # the font's advance is 0.602 of its size
PADDING, GAP, LINE, MARGIN = 0.05, 0.4, 0.27, 0.15
LEGEND_WIDTH = 4.6
LONGEST_LABEL = 16
PATH_COLOR, BONUS_COLOR, OTHERS_COLOR = "#0072b2", "#d55e00", "#999999"  # told apart by every kind of eye


class Place(NamedTuple):
    """A node's box in inches."""

    left: float
    middle: float  # from below
    width: float


def draw_tree(watched: Watched | Tree, target: Target, ax: "Axes | None" = None) -> "Axes":
    """Draws a draft tree, each node with its token's text; the darker, the likelier the head thought its path.

    A watched round also shows the path that the target accepted, with the bonus token at its end, and greys the rest.

    Args:
      watched: a round, or a bare tree: its only row [N], or its first one [B, N].
      target: its tokenizer names the tokens; without one they are numbers.
      ax: None makes a figure of the size that the tree needs.
    """
    try:
        from matplotlib import colormaps, pyplot
        from matplotlib.lines import Line2D
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Curve
    except ImportError as error:
        raise ImportError('Pictures of trees need matplotlib; run pip install "eagle_jax[plots]".') from error

    watching = isinstance(watched, Watched)
    tree = watched.tree if watching else watched
    tokens, parents, depths, log_scores = (
        np.atleast_2d(column)[0].tolist() for column in (tree.tokens, tree.parents, tree.depths, tree.log_scores)
    )
    path, bonus = set(), None
    if watching:
        path, bonus, last = set(watched.path), len(tokens), watched.path[-1]
        tokens, parents, depths = [*tokens, watched.tokens[-1]], [*parents, last], [*depths, depths[last] + 1]
        log_scores = [*log_scores, 0.0]
    labels = [label_of(target, token) for token in tokens]
    places, width, height = _lay_out(parents, depths, log_scores, labels)
    below = LINE if watching else 0.0  # for the legend
    width = max(width, LEGEND_WIDTH) if watching else width

    if ax is None:
        ax = pyplot.figure(figsize=(width, height + below)).add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(-below, height))
    ax.set_axis_off()
    codes = [Curve.MOVETO] + [Curve.CURVE4] * 3
    for node, place in places.items():
        on_path = node in path or node == bonus
        color = BONUS_COLOR if node == bonus else PATH_COLOR if on_path else OTHERS_COLOR
        style = {"edgecolor": color, "linewidth": 1.7 if on_path else 0.6, "linestyle": "--" if node == bonus else "-"}
        # Most of a tree is unlikely; the square root keeps its shades apart.
        shade = colormaps["Greys" if watching and not on_path else "Blues"](0.6 * math.exp(log_scores[node] / 2))
        ax.text(
            place.left,
            place.middle,
            labels[node],
            parse_math=False,  # a token may well hold a dollar sign
            family=FONT,
            fontsize=POINTS,
            fontweight="bold" if on_path else "normal",
            verticalalignment="center_baseline",
            bbox={
                "boxstyle": f"round,pad={PADDING * 72 / POINTS}",
                "facecolor": "white" if node == bonus else shade,
                **style,
            },
            zorder=2,
        )
        if node != ROOT:
            parent = places[parents[node]]
            begin, end = parent.left + parent.width + PADDING, place.left - PADDING
            bend = (begin + end) / 2
            points = [(begin, parent.middle), (bend, parent.middle), (bend, place.middle), (end, place.middle)]
            ax.add_patch(PathPatch(Curve(points, codes), facecolor="none", zorder=1, **style))
    if watching:
        lines = [
            Line2D([], [], color=PATH_COLOR, linewidth=1.7, label="accepted"),
            Line2D([], [], color=BONUS_COLOR, linewidth=1.7, linestyle="--", label="bonus token"),
            Line2D([], [], color=OTHERS_COLOR, linewidth=0.6, label="rejected (darker: likelier)"),
        ]
        ax.legend(handles=lines, loc="lower left", ncols=3, fontsize=8, frameon=False, borderpad=0.2, columnspacing=1.2)
    return ax


def _lay_out(
    parents: list[int], depths: list[int], log_scores: list[float], labels: list[str]
) -> tuple[dict[int, Place], float, float]:
    """Places of all nodes but padding; width and height of the whole."""
    nodes = [node for node, parent in enumerate(parents) if node == ROOT or parent != NO_PARENT]
    widths = [len(label) * CHARACTER for label in labels]
    columns = [0.0] * (1 + max(depths[node] for node in nodes))
    for node in nodes:
        columns[depths[node]] = max(columns[depths[node]], widths[node])
    lefts = MARGIN + np.cumsum([0.0] + [column + GAP for column in columns])
    children = {node: [] for node in nodes}
    for node in sorted(nodes, key=lambda node: -log_scores[node]):
        if node != ROOT:
            children[parents[node]].append(node)

    lines: dict[int, float] = {}  # from above
    leaves = 0
    unseen = [ROOT]
    while unseen:  # leaves take lines in the order of a walk that goes to the best child first
        node = unseen.pop()
        unseen += reversed(children[node])
        if not children[node]:
            lines[node], leaves = float(leaves), leaves + 1
    for node in reversed(nodes):  # children stand after their parents
        if children[node]:
            lines[node] = (lines[children[node][0]] + lines[children[node][-1]]) / 2
    height = leaves * LINE + 2 * MARGIN
    places = {
        node: Place(float(lefts[depths[node]]), height - MARGIN - (lines[node] + 0.5) * LINE, widths[node])
        for node in nodes
    }
    return places, float(lefts[-1]) - GAP + MARGIN, height


def label_of(target: Target, token: int) -> str:
    """A token's text on one line: spaces and line ends are shown, and what the font does not have is escaped."""
    if target.tokenizer is None:
        return str(token)
    # Some tokenizers drop a space at the beginning of a text, so the token is read where it follows itself.
    once, twice = (target.tokenizer.decode([token] * times) for times in (1, 2))
    label = "".join(_visible(character) for character in twice[len(once) :] or once)
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def _visible(character: str) -> str:
    if character == " ":
        return "␣"
    if character.isprintable() and ord(character) in _glyphs():
        return character
    return character.encode("unicode_escape").decode()


@functools.cache
def _glyphs() -> dict[int, Any]:
    from matplotlib import font_manager

    return font_manager.get_font(font_manager.findfont(FONT)).get_charmap()
