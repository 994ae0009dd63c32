"""The pages of the site about the package: one a folder, from docstrings, with nothing imported.

The source is parsed, so no page needs torch. Docstrings are read as Markdown, which they nearly
are: text that is indented by four is code, and so is text in backticks. A public name in backticks
becomes a link. The sections of the Google layout (`Args:`, `Returns:`, `Raises:`, `Source:` and
`Example:`) become tables, paragraphs and code.
"""

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CODE = re.compile(r"(?<!`)`([A-Za-z_.]+)(\(\))?`(?!`)")
SENTENCE = re.compile(r"(.+?(?:\?|(?=[.:](?: |$))))[.:]?(?: (.*))?$")
SECTION = re.compile(r"(Args|Returns|Raises|Source|Example):$")
Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Entry:
    """A public name: how people import it, and where it is defined."""

    name: str  # amp_lab.xray
    folder: str  # core, tracing, train
    node: Definition
    source: tuple[str, ...]  # lines of its module


def pages(package: Path) -> dict[str, str]:
    """The pages by their file names: `index.md`, and one for each folder that has public names."""
    entries = public_names(package)
    links = {entry.name.rpartition(".")[2]: entry.name for entry in entries}
    links |= {entry.name: entry.name for entry in entries}
    by_folder: dict[str, list[Entry]] = {}
    for entry in entries:
        by_folder.setdefault(entry.folder, []).append(entry)
    made = {}
    overview = ["# What `amp_lab` has", _paragraphs(_docstring(package), links)]
    for folder, listed in sorted(by_folder.items()):
        named = sorted(listed, key=lambda entry: entry.name.rpartition(".")[2].lower())
        text = _docstring(package / folder)
        found = SENTENCE.match(" ".join(text.partition("\n\n")[0].split()))
        title, rest = (f"`{folder}/`: {found[1]}", found[2] or "") if found else (folder, text)
        rest = rest[:1].upper() + rest[1:] + "\n\n" + text.partition("\n\n")[2]
        body = [f"# {title}", _paragraphs(rest.strip(), links)]
        body += [_entry(entry, links) for entry in named]
        made[f"{folder}.md"] = "\n\n".join(filter(None, body)) + "\n"
        rows = [f"| {{py:obj}}`{e.name}` | {_summary(e.node, links)} |" for e in named]
        overview += [f"## [{folder}]({folder}.md)", "\n".join(["| name | |", "|---|---|", *rows])]
    tree = "\n".join(name.removesuffix(".md") for name in sorted(made))
    overview.append(f"```{{toctree}}\n:hidden:\n\n{tree}\n```")
    made["index.md"] = "\n\n".join(overview) + "\n"
    return made


def public_names(package: Path) -> list[Entry]:
    """What `amp_lab` exports, and what its folders export besides."""
    found: dict[tuple[str, str], Entry] = {}

    def add(name: str, module: str, origin: str) -> None:
        defined = _definition(package, module, origin)
        if defined is None:
            return
        where, node = defined
        folder = where.partition(".")[0]
        source = tuple(_path(package, where).read_text(encoding="utf-8").splitlines())
        found.setdefault((where, origin), Entry(name, folder, node, source))

    exports = _literal(package / "__init__.py", "_EXPORTS") or {}
    for name, module in exports.items():
        add(f"amp_lab.{name}", module, name)
    for module, name in _figures(package / "plots"):
        add(f"amp_lab.plots.{name}", module, name)
    for file in sorted(package.glob("*/**/__init__.py")):
        module = ".".join(file.parent.relative_to(package).parts)
        for name in _literal(file, "__all__") or ():
            add(f"amp_lab.{module}.{name}", module, name)
    return list(found.values())


def _figures(plots: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each figure: all that is public is exported, and of `style` this."""
    for file in sorted(plots.glob("[a-z]*.py")):
        names = [node.name for node in _tree(file).body if isinstance(node, ast.FunctionDef)]
        for name in names:
            if file.stem == "style" and name not in ("image", "save", "use_style"):
                continue
            if not name.startswith("_"):
                yield f"plots.{file.stem}", name


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _path(package: Path, module: str) -> Path:
    path = package.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _literal(file: Path, name: str):
    """The value of an assignment of plain values at a module's top; None if there is none."""
    for node in _tree(file).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return None


def _definition(package: Path, module: str, name: str) -> tuple[str, Definition] | None:
    """The module that defines a name, and the definition; None for what is no class or function."""
    for node in ast.walk(_tree(_path(package, module))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amp_lab"):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    origin = (node.module or "").removeprefix("amp_lab").lstrip(".")
                    return _definition(package, origin, alias.name)
    return None


def _docstring(folder: Path) -> str:
    return ast.get_docstring(_tree(folder / "__init__.py")) or ""


def _first_sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).rstrip(".")


def _summary(node: Definition, links: dict[str, str]) -> str:
    return _paragraphs(_first_sentence(ast.get_docstring(node) or ""), links).replace("|", "\\|")


def _paragraphs(text: str, links: dict[str, str]) -> str:
    """A docstring as Markdown: public names become links, and examples are marked as code."""

    def linked(match: re.Match[str]) -> str:
        if match[1] not in links:
            return match[0]
        return f"{{py:obj}}`{match[1]}{match[2] or ''} <{links[match[1]]}>`"

    lines = []
    for line in text.splitlines():
        lines.append(line if line.startswith("    ") else CODE.sub(linked, line))
    return "\n".join(lines)


def sections(docstring: str) -> dict[str, str]:
    """The text of each section of a docstring by its heading; before the first heading it is ""."""
    lines: dict[str, list[str]] = {"": []}
    heading = ""
    for line in docstring.splitlines():
        match = SECTION.match(line)
        if match:
            heading = match[1]
            lines[heading] = []
        else:
            lines[heading].append(line)
    return {heading: textwrap.dedent("\n".join(text)).strip() for heading, text in lines.items()}


def items(section: str) -> dict[str, str]:
    """The entries ``name: meaning`` of a section; further lines of an entry are indented."""
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith(" "):
            found[name] += f" {line.strip()}"
        elif line:
            name, _, found[name] = line.partition(": ")
    return found


def arguments(node: Definition) -> dict[str, str]:
    """The type and the default of each argument, in the order of the signature."""
    if isinstance(node, ast.ClassDef):
        made_by = [p for p in node.body if isinstance(p, ast.FunctionDef) and p.name == "__init__"]
        return arguments(made_by[0]) if made_by else {}
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    without_default = [None] * (len(positional) - len(args.defaults))
    pairs = list(zip(positional, [*without_default, *args.defaults], strict=True))
    found = {arg.arg: _type_text(arg, default) for arg, default in pairs}
    if args.vararg:
        found[f"*{args.vararg.arg}"] = _type_text(args.vararg, None)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found[arg.arg] = _type_text(arg, default)
    if args.kwarg:
        found[f"**{args.kwarg.arg}"] = _type_text(args.kwarg, None)
    return {name: text for name, text in found.items() if name not in ("self", "cls")}


def _type_text(arg: ast.arg, default: ast.expr | None) -> str:
    """Such as ```float` = `2.0```; empty for an argument without type and default."""
    parts = [ast.unparse(part) for part in (arg.annotation, default) if part is not None]
    return " = ".join(f"`{part}`" for part in parts).replace("'", '"')


def example_code(example: str, public: set[str]) -> str:
    """An example with the imports that it needs; `public` are the names that `amp_lab` exports."""
    names = {node.id for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Name)}
    imports = []
    if "torch" in names:
        imports.append("import torch")
    if "nn" in names:
        imports.append("from torch import nn")
    if names & public:
        imports.append(f"from amp_lab import {', '.join(sorted(names & public))}")
    return "\n".join([*imports, "", example]).strip()


def _description(node: Definition, links: dict[str, str]) -> str:
    """The docstring of a class or function as Markdown, section by section."""
    parts = []
    for heading, text in sections(ast.get_docstring(node) or "").items():
        if heading == "Example":
            public = {name for name, target in links.items() if target == f"amp_lab.{name}"}
            parts.append(f"**Example:**\n\n```python\n{example_code(text, public)}\n```")
        elif heading == "Args":
            types = arguments(node)
            rows = [[f"`{name}`", types.get(name, ""), said] for name, said in items(text).items()]
            parts.append(_table(["argument", "type, default", "meaning"], rows, links))
        elif heading == "Raises":
            rows = [[f"`{name}`", said] for name, said in items(text).items()]
            parts.append(_table(["raises", "when"], rows, links))
        elif heading:
            parts.append(f"**{heading}:** {_paragraphs(text, links)}")
        else:
            parts.append(_paragraphs(text, links))
    return "\n\n".join(parts)


def _table(head: list[str], rows: list[list[str]], links: dict[str, str]) -> str:
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append([_paragraphs(cell, links).replace("|", "\\|") for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _entry(entry: Entry, links: dict[str, str]) -> str:
    doc = _description(entry.node, links)
    if isinstance(entry.node, ast.FunctionDef):
        return _directive(5, "function", f"{entry.name}{_signature(entry.node)}", doc)
    parts = [doc, *members(entry, links)]
    heading = f"{entry.name}{_class_signature(entry.node)}"
    return _directive(5, "class", heading, "\n\n".join(filter(None, parts)))


def _directive(ticks: int, kind: str, heading: str, body: str, option: str = "") -> str:
    fence = "`" * ticks
    return f"{fence}{{py:{kind}}} {heading}\n{option}\n{body}\n{fence}"


def _signature(node: ast.FunctionDef, skip: int = 0) -> str:
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    args = arguments.args
    args.args = args.args[skip:]
    args.defaults = args.defaults[-len(args.args) :] if args.args else []
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return " ".join(f"({ast.unparse(args)}){returns}".replace("'", '"').split())


def _class_signature(node: ast.ClassDef) -> str:
    """What a class is made with, where people make it themselves; else nothing."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return _signature(part, skip=1).partition(" ->")[0]
    return ""


def members(entry: Entry, links: dict[str, str]) -> Iterator[str]:
    """Public fields, properties and methods that have something said about them."""
    node = entry.node
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            said = _comment(entry.source[part.lineno - 1]) or _text_of(after)
            if not part.target.id.startswith("_"):
                kind = f":type: {ast.unparse(part.annotation)}\n"
                yield _directive(4, "attribute", part.target.id, _paragraphs(said, links), kind)
        elif isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            if ast.get_docstring(part) is None:
                continue
            marks = [ast.unparse(mark) for mark in part.decorator_list]
            if "property" in marks or "functools.cached_property" in marks:
                kind = f":type: {ast.unparse(part.returns)}\n" if part.returns else ""
                yield _directive(4, "property", part.name, _description(part, links), kind)
                continue
            skip = 0 if "staticmethod" in marks else 1
            option = ":classmethod:\n" if "classmethod" in marks else ""
            heading = f"{part.name}{_signature(part, skip)}"
            yield _directive(4, "method", heading, _description(part, links), option)


def _comment(line: str) -> str:
    return line.partition("  # ")[2].strip()


def _text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""
