"""The advice for old names of torch that are not rewritten."""

from amp_lab.core.remedies import remedy

REPLACED = remedy(
    "migrate.replaced",
    "a test or other code replaces an old name, as mock.patch does",
    "{old} is replaced here: replace torch.amp.{name} instead, in the module that uses the name",
)
REPLACED_ELSEWHERE = remedy(
    "migrate.replaced_elsewhere",
    "an old name is used that other lines replace",
    "{old} is replaced (line {lines}): write torch.amp.{name} in both places",
)
AMBIGUOUS = remedy(
    "migrate.ambiguous",
    "depending on the branch taken, a name is an old name of torch or something else",
    "lines {lines} bind {name} to different things: give them different names, then use "
    "torch.amp with the device",
)
TWO_THINGS = remedy(
    "migrate.two_things",
    "a scope binds a name to an old name of torch and to something else",
    "one scope binds {name} to different things: give them different names, then use "
    "torch.amp with the device",
)
NO_TORCH = remedy(
    "migrate.no_torch",
    "a file uses an old name where the name torch is not available",
    "write torch.amp.{name} instead of {written}, and import torch",
)
GIVE_DTYPE = remedy(
    "migrate.give_dtype",
    "a file uses autocast without a dtype where the name torch is not available",
    "import torch, and pass dtype=torch.{dtype}",
)
COMMENT_INSIDE = remedy(
    "migrate.comment_inside",
    "a comment stands between the parts of an old name",
    "a comment stands inside the name: write torch.amp.{name}",
)
IN_MAGIC = remedy(
    "migrate.in_magic",
    "an IPython magic uses an old name",
    "a magic uses {old}, and migrate does not change magics: use torch.amp there",
)
IN_F_STRING = remedy(
    "migrate.in_f_string",
    "an old name stands inside an f-string",
    'the old name is inside an f-string: write torch.amp.{name} with "{device}"',
)
MODULE_AS_VALUE = remedy(
    "migrate.module_as_value",
    "a module of old names is assigned or passed on",
    "{old} is used as a value: use torch.amp, and pass the device {device!r} in each call",
)
CLASS_AS_VALUE = remedy(
    "migrate.class_as_value",
    "an old class is passed on and called elsewhere",
    '{old} is used as a value: write functools.partial(torch.amp.{name}, "{device}"{defaults})',
)
ATTRIBUTE = remedy(
    "migrate.attribute",
    "an attribute of an old class is used",
    "{old} is used as a value: use torch.amp.{name}",
)
DELETED = remedy(
    "migrate.deleted",
    "the code deletes an old name after use",
    "this line deletes the old name {old}: write torch.amp.{name} in the lines that use the old "
    "name, and delete this line",
)
COMPARED = remedy(
    "migrate.compared",
    "a class is compared with an old one",
    "a class is compared with {name}: write torch.amp.{name} in all places",
)
SCALER_COMPARED = remedy(
    "migrate.scaler_compared",
    "a scaler is created in a file that checks for its class",
    "line {line} compares a class with {name}: write torch.amp.{name} in all places, also in "
    "other files",
)
ONE_CLASS = remedy(
    "migrate.one_class",
    "the code reads the device of an object from its class",
    "torch.amp.{name} is one class for all devices: check the device of the object, "
    'here "{device}"',
)
SUBCLASS = remedy(
    "migrate.subclass",
    "a class derives from an old one",
    "a class derives from the old one: derive from torch.amp.{name}, and pass "
    '"{device}" first in super().__init__',
)
BARE_DECORATOR = remedy(
    "migrate.bare_decorator",
    "an old class decorates a function without being called",
    'without brackets, this decorator never calls the function: write torch.amp.{name}("cuda")',
)
CALLED_BY_POSITION = remedy(
    "migrate.called_by_position",
    "a partial of autocast may be called with positional arguments",
    "the caller may pass arguments by position, but the order has changed: write "
    'functools.partial(torch.amp.autocast, "{device}", dtype=torch.{dtype}, …), '
    "and enabled=… where it is called",
)
POSITIONAL = remedy(
    "migrate.positional",
    "autocast gets positional arguments that cannot be counted",
    "the order of the positional arguments has changed: write "
    'torch.amp.autocast("{device}", enabled=…, dtype=…, cache_enabled=…)',
)
DOUBLE_STAR = remedy(
    "migrate.double_star",
    "autocast gets ** arguments, in a file that may change the current autocast dtype",
    'the ** arguments may lack a dtype: write torch.amp.autocast("{device}", …), and add '
    "dtype=torch.{dtype} if it is missing",
)
CLASS_IMPORTED = remedy(
    "migrate.class_imported",
    "a file imports an old class for other files",
    "other files may use {name} from here: import {name} from torch.amp there, and pass the "
    'device "{device}"',
)
MODULE_IMPORTED = remedy(
    "migrate.module_imported",
    "a class body imports a module of old names",
    "other code may use {name} from this class: use torch.amp there, and pass the device "
    '"{device}"',
)
STAR = remedy(
    "migrate.star",
    "a file imports everything from a module of old names",
    "this line imports everything from {module}: import only the names that you use, from "
    "torch.amp, and pass the device in each call",
)
DEVICE_AS_SCALE = remedy(
    "migrate.device_as_scale",
    "an old GradScaler gets a device as its first argument, which is the scale",
    "the old GradScaler uses {written} as the scale and fails: write torch.amp.GradScaler"
    "({written})",
    failure="AMP0035",
)
