"""What to write by hand where an old name of torch is not rewritten."""

from amp_lab.core.remedies import remedy

REPLACED = remedy(
    "migrate.replaced",
    "a test or other code puts something else in the place of an old name",
    "{old} is replaced here: replace torch.amp.{name}, where that is used",
)
REPLACED_ELSEWHERE = remedy(
    "migrate.replaced_elsewhere",
    "an old name is used that other lines replace",
    "{old} is replaced (line {lines}): write torch.amp.{name} in both places",
)
AMBIGUOUS = remedy(
    "migrate.ambiguous",
    "a name may be an old name of torch or something else, depending on the path taken",
    "{name} is bound to different things (lines {lines}): give them different names, then use "
    "torch.amp with its device",
)
TWO_THINGS = remedy(
    "migrate.two_things",
    "a scope binds a name to an old name of torch and to something else",
    "{name} is bound to different things in one scope: give them different names, then use "
    "torch.amp with its device",
)
NO_TORCH = remedy(
    "migrate.no_torch",
    "the file has no name for torch where an old name is used",
    "write torch.amp.{name} for {written}, and import torch",
)
GIVE_DTYPE = remedy(
    "migrate.give_dtype",
    "an autocast without a dtype is used where the file has no name for torch",
    "import torch, and give it dtype=torch.{dtype}",
)
COMMENT_INSIDE = remedy(
    "migrate.comment_inside",
    "a comment stands between the parts of an old name",
    "a comment stands inside the name: write torch.amp.{name}",
)
IN_MAGIC = remedy(
    "migrate.in_magic",
    "a magic of IPython uses an old name",
    "a magic, which is left as it is, uses {old}: use torch.amp there",
)
IN_F_STRING = remedy(
    "migrate.in_f_string",
    "an old name stands inside an f-string",
    'inside an f-string: write torch.amp.{name}, with "{device}"',
)
MODULE_AS_VALUE = remedy(
    "migrate.module_as_value",
    "a module of old names is assigned or handed on",
    "{old} is used as a value: use torch.amp, and give its device {device!r} in each call",
)
CLASS_AS_VALUE = remedy(
    "migrate.class_as_value",
    "an old class is handed on, and called elsewhere",
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
    "its name is deleted here: write torch.amp.{name} where it is used, and drop this line",
)
COMPARED = remedy(
    "migrate.compared",
    "a class is compared with an old one",
    "{name} is compared with: write torch.amp.{name} in all places",
)
SCALER_COMPARED = remedy(
    "migrate.scaler_compared",
    "a scaler is made in a file that asks for its class",
    "{name} is compared with (line {line}): write torch.amp.{name} in all places, here and in "
    "other files",
)
ONE_CLASS = remedy(
    "migrate.one_class",
    "the class of an object tells its device",
    'torch.amp.{name} is one class for all devices: ask for its device, here "{device}"',
)
SUBCLASS = remedy(
    "migrate.subclass",
    "a class derives from an old one",
    "a class derives from it: derive from torch.amp.{name}, and give "
    '"{device}" first in super().__init__',
)
BARE_DECORATOR = remedy(
    "migrate.bare_decorator",
    "an old class decorates a function without being called",
    'without brackets it decorates nothing: write torch.amp.{name}("cuda")',
)
CALLED_BY_POSITION = remedy(
    "migrate.called_by_position",
    "a partial of autocast may be called with positional arguments",
    "what calls it may give arguments by position, whose order is another now: write "
    'functools.partial(torch.amp.autocast, "{device}", dtype=torch.{dtype}, …), '
    "and enabled=… where it is called",
)
POSITIONAL = remedy(
    "migrate.positional",
    "autocast gets positional arguments that cannot be counted",
    'its positional arguments changed their order: write torch.amp.autocast("{device}", enabled=…, '
    "dtype=…, cache_enabled=…)",
)
DOUBLE_STAR = remedy(
    "migrate.double_star",
    "autocast gets ** arguments, in a file that may change the dtype in force",
    'its ** may leave out the dtype: write torch.amp.autocast("{device}", …), with '
    "dtype=torch.{dtype} unless the ** hold one",
)
CLASS_IMPORTED = remedy(
    "migrate.class_imported",
    "a file imports an old class for other files",
    "{name} is not used here, or not only: import it from torch.amp where it is used, with its "
    'device "{device}"',
)
MODULE_IMPORTED = remedy(
    "migrate.module_imported",
    "a class body imports a module of old names",
    "{name} is not used here, or not only: use torch.amp where it is used, with its device "
    '"{device}"',
)
STAR = remedy(
    "migrate.star",
    "a file imports everything of a module of old names",
    "from {module} import *: import the names that are used from torch.amp, and give each call its "
    "device",
)
DEVICE_AS_SCALE = remedy(
    "migrate.device_as_scale",
    "an old GradScaler is given a device, and takes it for the scale",
    "the old GradScaler takes {written} for the scale and fails: write torch.amp.GradScaler"
    "({written})",
    failure="AMP0035",
)
