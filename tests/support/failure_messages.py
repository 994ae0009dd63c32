"""Messages of the reference of failures as a program would print them."""

import re


def printed(message: str) -> str:
    """The message with something in place of each placeholder, as the last line of a log."""
    text = message.replace("{n}", "7").replace("{dtype}", "Half")
    text = re.sub(r"\{\w+\}", "x", text)
    return f"with autocast\nRuntimeError: {text}"
