"""What `tools/lab.py` changes of Jupyter's server: files, who may enter, the address it prints.

Opening and saving a notebook untouched changes nothing. JupyterLab writes into a notebook what its
kernel says of its language, with the version of Python. A notebook without it counts as changed as
soon as it is open, and one with it differs from machine to machine. So it is there as long as a
notebook is open, and not in the file. Jupytext adds the filters of metadata that stand in
pyproject.toml, which need not be in each notebook.
"""

import sys
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from jupyter_server import serverapp
from jupyter_server.auth.identity import PasswordIdentityProvider
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from traitlets import Bool

NO_TOKEN = (
    "lab: the token is empty, and would let anyone in who reaches this port: give a token, or "
    "leave it out to get one"
)
FILTERS = {"cell_metadata_filter", "notebook_metadata_filter"}


class Contents(AsyncLargeFileManager):
    """Files as Jupyter's own manager has them, but for the language of notebooks."""

    async def get(self, path: str, content: bool = True, *args: Any, **options: Any) -> dict:
        """A file or a folder; a notebook with the language that its kernel will name."""
        model = await super().get(path, content, *args, **options)
        if content and model["type"] == "notebook":
            metadata = model["content"]["metadata"]
            metadata.setdefault("language_info", dict(IPythonKernel.language_info))
        return model

    async def save(self, model: dict, path: str = "") -> dict:
        """Save a file, and a notebook without the language and Jupytext's filters."""
        if model.get("type") == "notebook" and model.get("content"):
            metadata = model["content"]["metadata"]
            metadata.pop("language_info", None)
            if "jupytext" in metadata:
                for name in FILTERS:
                    metadata["jupytext"].pop(name, None)
                if not metadata["jupytext"]:  # nothing else was in it
                    del metadata["jupytext"]
        return await super().save(model, path)


class TokenRequired(PasswordIdentityProvider):
    """Ends a server that would ask for neither a token nor a password, however that was set."""

    def validate_security(self, app: Any, ssl_options: dict[str, Any] | None = None) -> None:
        """Called by the server once all its settings are read, before it listens."""
        if not self.auth_enabled:
            print(NO_TOKEN, file=sys.stderr)
            sys.exit(2)
        super().validate_security(app, ssl_options)


class ServerApp(serverapp.ServerApp):
    """The server of a container: prints its address outside, which is the only one that works."""

    no_browser_open_file = Bool(True)  # it is inside, and would be printed as an address too

    @property
    def display_url(self) -> str:
        """The address, with the token unless the user has set it."""
        return self.public_url.removesuffix("?token=...")

    @property
    def connect_url(self) -> str:
        """The same address."""
        return self.display_url
