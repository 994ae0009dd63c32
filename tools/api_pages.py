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

# `name` or `name()`: the name, and its brackets or nothing.
CODE = re.compile(r"(?<!`)`([A-Za-z_.]+)(\(\))?`(?!`)")
# A text on one line: its first sentence without the full stop, and the rest.
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
    links = _links(entries)
    texts = {}  # by file name
    overview = ["# What `amp_lab` has", _paragraphs(_docstring(package), links)]
    for folder, entries_of_folder in sorted(_by_folder(entries).items()):
        in_order = sorted(entries_of_folder, key=_sorting_key)
        texts[f"{folder}.md"] = _folder_page(folder, _docstring(package / folder), in_order, links)
        overview.append(f"## [{folder}]({folder}.md)")
        overview.append(_overview_table(in_order, links))
    tree = "\n".join(name.removesuffix(".md") for name in sorted(texts))
    overview.append(f"```{{toctree}}\n:hidden:\n\n{tree}\n```")
    texts["index.md"] = _joined(overview) + "\n"
    return texts


def _links(entries: list[Entry]) -> dict[str, str]:
    """The full names by what a docstring may call them: ``xray``, or ``amp_lab.xray``."""
    links = {_last_part(entry.name): entry.name for entry in entries}
    for entry in entries:
        links[entry.name] = entry.name
    return links


def _by_folder(entries: list[Entry]) -> dict[str, list[Entry]]:
    by_folder: dict[str, list[Entry]] = {}
    for entry in entries:
        by_folder.setdefault(entry.folder, []).append(entry)
    return by_folder


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _sorting_key(entry: Entry) -> str:
    return _last_part(entry.name).lower()


def _folder_page(folder: str, text: str, entries: list[Entry], links: dict[str, str]) -> str:
    """The page of a folder whose docstring is `text`; its first sentence becomes the title."""
    first, _, further = text.partition("\n\n")
    match = SENTENCE.match(_on_one_line(first))
    if match:
        title = f"`{folder}/`: {match[1]}"
        rest = match[2] or ""
    else:
        title = folder
        rest = text
    capitalised = rest[:1].upper() + rest[1:]
    below_title = f"{capitalised}\n\n{further}".strip()
    body = [f"# {title}", _paragraphs(below_title, links)]
    for entry in entries:
        body.append(_entry(entry, links))
    return _joined(body) + "\n"


def _overview_table(entries: list[Entry], links: dict[str, str]) -> str:
    """A table of the entries, each with a link and the first sentence of its docstring."""
    lines = ["| name | |", "|---|---|"]
    for entry in entries:
        summary = _summary(entry.node, links)
        lines.append(f"| {{py:obj}}`{entry.name}` | {summary} |")
    return "\n".join(lines)


def _joined(parts: list[str]) -> str:
    """Parts of a page with a blank line between them; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def public_names(package: Path) -> list[Entry]:
    """What `amp_lab` exports, and what its folders export besides."""
    # By the module that defines it and its name there: a name that is exported twice counts once.
    entries: dict[tuple[str, str], Entry] = {}

    def add(name: str, module: str, name_in_module: str) -> None:
        """Add the entry of a name that `module` defines or imports, if it is the first for it."""
        module_and_node = _definition(package, module, name_in_module)
        if module_and_node is None:
            return
        defining_module, node = module_and_node
        folder = defining_module.partition(".")[0]
        text = _path(package, defining_module).read_text(encoding="utf-8")
        entry = Entry(name, folder, node, tuple(text.splitlines()))
        entries.setdefault((defining_module, name_in_module), entry)

    exports = _literal(package / "__init__.py", "_EXPORTS") or {}
    for name, module in exports.items():
        add(f"amp_lab.{name}", module, name)
    for module, name in _figures(package / "plots"):
        add(f"amp_lab.plots.{name}", module, name)
    for file in sorted(package.glob("*/**/__init__.py")):
        module = ".".join(file.parent.relative_to(package).parts)
        for name in _literal(file, "__all__") or ():
            add(f"amp_lab.{module}.{name}", module, name)
    return list(entries.values())


def _figures(plots: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each figure: all that is public is exported, and of `style` this."""
    for file in sorted(plots.glob("[a-z]*.py")):
        for node in _tree(file).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            if file.stem == "style" and node.name not in ("image", "save", "use_style"):
                continue
            yield f"plots.{file.stem}", node.name


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
        if not isinstance(node, ast.ImportFrom):
            continue
        imported_from = node.module or ""
        if not imported_from.startswith("amp_lab"):
            continue
        for alias in node.names:
            name_here = alias.asname or alias.name
            if name_here == name:  # another module defines it, or imports it in turn
                origin = imported_from.removeprefix("amp_lab").lstrip(".")
                return _definition(package, origin, alias.name)
    return None


def _docstring(folder: Path) -> str:
    return ast.get_docstring(_tree(folder / "__init__.py")) or ""


def _first_sentence(text: str) -> str:
    first_paragraph = text.partition("\n\n")[0]
    return _on_one_line(first_paragraph).rstrip(".")


def _summary(node: Definition, links: dict[str, str]) -> str:
    docstring = ast.get_docstring(node) or ""
    return _cell(_first_sentence(docstring), links)


def _cell(text: str, links: dict[str, str]) -> str:
    """A text for a cell of a table, where a bar would end the cell."""
    return _paragraphs(text, links).replace("|", "\\|")


def _paragraphs(text: str, links: dict[str, str]) -> str:
    """A docstring as Markdown: public names become links, and examples are marked as code."""

    def linked(match: re.Match[str]) -> str:
        name = match[1]
        if name not in links:
            return match[0]
        brackets = match[2] or ""
        return f"{{py:obj}}`{name}{brackets} <{links[name]}>`"

    lines = []
    for line in text.splitlines():
        is_code = line.startswith("    ")
        lines.append(line if is_code else CODE.sub(linked, line))
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
    texts = {}
    for heading, text in lines.items():
        texts[heading] = textwrap.dedent("\n".join(text)).strip()
    return texts


def items(section: str) -> dict[str, str]:
    """The entries ``name: meaning`` of a section; further lines of an entry are indented."""
    meanings: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith(" "):
            meanings[name] += f" {line.strip()}"
        elif line:
            name, _, meaning = line.partition(": ")
            meanings[name] = meaning
    return meanings


def arguments(node: Definition) -> dict[str, str]:
    """The type and the default of each argument, in the order of the signature."""
    if isinstance(node, ast.ClassDef):
        init = _init_of(node)
        return arguments(init) if init else {}
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    # `args.defaults` has those of the last arguments alone.
    without_default = [None] * (len(positional) - len(args.defaults))
    defaults = [*without_default, *args.defaults]
    texts = {}
    for arg, default in zip(positional, defaults, strict=True):
        texts[arg.arg] = _type_text(arg, default)
    if args.vararg:
        texts[f"*{args.vararg.arg}"] = _type_text(args.vararg, None)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        texts[arg.arg] = _type_text(arg, default)
    if args.kwarg:
        texts[f"**{args.kwarg.arg}"] = _type_text(args.kwarg, None)
    for bound in ("self", "cls"):
        texts.pop(bound, None)
    return texts


def _init_of(node: ast.ClassDef) -> ast.FunctionDef | None:
    """The `__init__` that a class has of its own."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return part
    return None


def _type_text(arg: ast.arg, default: ast.expr | None) -> str:
    """Such as ```float` = `2.0```; empty for an argument without type and default."""
    parts = []
    for part in (arg.annotation, default):
        if part is not None:
            code = ast.unparse(part).replace("'", '"')
            parts.append(f"`{code}`")
    return " = ".join(parts)


def example_code(example: str, public: set[str]) -> str:
    """An example with the imports that it needs; `public` are the names that `amp_lab` exports."""
    nodes = ast.walk(ast.parse(example))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    from_package = sorted(names & public)
    imports = []
    if "torch" in names:
        imports.append("import torch")
    if "nn" in names:
        imports.append("from torch import nn")
    if from_package:
        imports.append(f"from amp_lab import {', '.join(from_package)}")
    return "\n".join([*imports, "", example]).strip()


def _description(node: Definition, links: dict[str, str]) -> str:
    """The docstring of a class or function as Markdown, section by section."""
    docstring = ast.get_docstring(node) or ""
    parts = []
    for heading, text in sections(docstring).items():
        if heading == "Example":
            parts.append(_example(text, links))
        elif heading == "Args":
            parts.append(_arguments_table(node, text, links))
        elif heading == "Raises":
            rows = [[f"`{name}`", when] for name, when in items(text).items()]
            parts.append(_table(["raises", "when"], rows, links))
        elif heading:
            parts.append(f"**{heading}:** {_paragraphs(text, links)}")
        else:
            parts.append(_paragraphs(text, links))
    return "\n\n".join(parts)


def _example(text: str, links: dict[str, str]) -> str:
    public = {name for name, target in links.items() if target == f"amp_lab.{name}"}
    code = example_code(text, public)
    return f"**Example:**\n\n```python\n{code}\n```"


def _arguments_table(node: Definition, text: str, links: dict[str, str]) -> str:
    """The table of the arguments; `text` is the section ``Args`` of the docstring."""
    types = arguments(node)
    rows = []
    for name, meaning in items(text).items():
        rows.append([f"`{name}`", types.get(name, ""), meaning])
    return _table(["argument", "type, default", "meaning"], rows, links)


def _table(head: list[str], rows: list[list[str]], links: dict[str, str]) -> str:
    lines = [_row(head), _row(["---"] * len(head))]
    for row in rows:
        cells = [_cell(text, links) for text in row]
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _entry(entry: Entry, links: dict[str, str]) -> str:
    """The directive of a public function, or of a class with its members."""
    description = _description(entry.node, links)
    if isinstance(entry.node, ast.FunctionDef):
        heading = f"{entry.name}{_signature(entry.node)}"
        return _directive(5, "function", heading, description)
    heading = f"{entry.name}{_class_signature(entry.node)}"
    body = _joined([description, *members(entry, links)])
    return _directive(5, "class", heading, body)


def _directive(ticks: int, kind: str, heading: str, body: str, option: str = "") -> str:
    fence = "`" * ticks
    return f"{fence}{{py:{kind}}} {heading}\n{option}\n{body}\n{fence}"


def _signature(node: ast.FunctionDef, skip: int = 0) -> str:
    """Arguments and result on one line, without the first `skip` arguments."""
    # A copy of the arguments, which are shortened below; `node` stays as it is.
    copy = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(copy, ast.FunctionDef)
    args = copy.args
    args.args = args.args[skip:]
    # There may be no more defaults than arguments; they are those of the last ones.
    args.defaults = args.defaults[-len(args.args) :] if args.args else []
    text = f"({ast.unparse(args)})"
    if node.returns:
        text += f" -> {ast.unparse(node.returns)}"
    return _on_one_line(text.replace("'", '"'))


def _class_signature(node: ast.ClassDef) -> str:
    """What a class is made with, where people make it themselves; else nothing."""
    init = _init_of(node)
    if init is None:
        return ""
    return _signature(init, skip=1).partition(" ->")[0]


def members(entry: Entry, links: dict[str, str]) -> Iterator[str]:
    """Yield the text for each public field, property and method that is documented."""
    body = entry.node.body
    for part, next_part in zip(body, [*body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            name = part.target.id
            if not name.startswith("_"):
                # A comment on its line, or a string below it.
                description = _comment(entry.source[part.lineno - 1]) or _text_of(next_part)
                yield _attribute(name, part.annotation, description, links)
        elif isinstance(part, ast.FunctionDef):
            is_public = not part.name.startswith("_")
            if is_public and ast.get_docstring(part) is not None:
                yield _method(part, links)


def _attribute(name: str, annotation: ast.expr, said: str, links: dict[str, str]) -> str:
    return _directive(4, "attribute", name, _paragraphs(said, links), _type_option(annotation))


def _method(node: ast.FunctionDef, links: dict[str, str]) -> str:
    """A method, or what a property is for its reader: a value of a type."""
    description = _description(node, links)
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if "property" in marks or "functools.cached_property" in marks:
        option = _type_option(node.returns)
        return _directive(4, "property", node.name, description, option)
    skip = 0 if "staticmethod" in marks else 1
    option = ":classmethod:\n" if "classmethod" in marks else ""
    heading = f"{node.name}{_signature(node, skip)}"
    return _directive(4, "method", heading, description, option)


def _type_option(annotation: ast.expr | None) -> str:
    if annotation is None:
        return ""
    return f":type: {ast.unparse(annotation)}\n"


def _comment(line: str) -> str:
    return line.partition("  # ")[2].strip()


def _text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return _on_one_line(str(node.value.value))
    return ""
