"""The passes of fxckpt, one public function per file. Import them by submodule: ``from fxckpt.passes.dp import dp``.

Nothing is re-exported here, since a function named like its module would hide the module.
"""

if __name__ != "fxckpt.passes":
    raise ImportError(
        f"this folder was imported as {__name__!r}, but it is the package 'fxckpt.passes' "
        "(fxckpt/passes is a link to it); write `from fxckpt.passes import ...`"
    )
