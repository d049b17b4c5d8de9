"""The two ways a user can be told no: one sentence each, and an exit status."""


class ArchlabError(Exception):
    """Ends the program with one sentence and no traceback. The message names the offending value and the fix."""

    exit_status = 1


class UsageError(ArchlabError):
    """What was asked for cannot be: a misspelt key, an impossible size, a missing path."""

    exit_status = 2
