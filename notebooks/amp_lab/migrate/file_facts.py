"""What a whole file does, on which the rewriting of a single use of torch's old names depends."""

import functools

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.amp_names import NEW, OLD
from amp_lab.migrate.python_tree import Tree


class FileFacts:
    """What is done in a file with the defaults of autocast, and with the class GradScaler."""

    def __init__(self, tree: Tree):
        self.tree = tree

    @functools.cached_property
    def turns_cache_off(self) -> bool:
        """Whether something in the file may turn the cache of casts off."""
        tree = self.tree
        is_set = any(use.parts[-1] == "set_autocast_cache_enabled" for use in tree.uses)
        return is_set or any("cache_enabled" in nodes.arguments(call.args) for call in tree.calls)

    @functools.cached_property
    def sets_defaults(self) -> bool:
        """Whether something in the file may change the dtype in force, or turn the cache off."""
        is_set = any(use.parts[-1].startswith("set_autocast_") for use in self.tree.uses)
        calls = ((call, scope.origin(call.func) or "") for call, scope in self.tree.calls.items())
        args = [call.args for call, origin in calls if origin.endswith(".autocast")]
        is_given = any("dtype" in nodes.arguments(each, ("", "dtype")) for each in args)
        return is_set or self.turns_cache_off or is_given

    @functools.cached_property
    def compared(self) -> list[cst.CSTNode]:
        """Where the class GradScaler is compared with: what is made has to be of that class."""
        scalers = {old for old, (name, _) in OLD.items() if name == "GradScaler"}
        uses = [use.node for use in self.tree.uses if use.origins & scalers]
        places = {node: self.tree.place_of_type(node) for node in uses}
        return [n for n, p in places.items() if not isinstance(p, cst.Annotation | None)]

    @functools.cached_property
    def takes_dtype(self) -> bool:
        """Whether something in the file takes the dtype that is in force around it."""
        tree = self.tree
        if any(use.parts[-1].startswith("get_autocast_") for use in tree.uses):
            return True
        for call, scope in tree.calls.items():
            given = nodes.arguments(call.args)
            is_by_place = sum(arg.keyword is None for arg in call.args) > 1
            if NEW.get(scope.origin(call.func) or "") != "autocast" or is_by_place:
                continue
            if "dtype" not in given and not nodes.is_false(given.get("enabled")):
                return True
        return False
