"""Errors a user can cause. Each message is one line that names the thing and the remedy."""


class DDTreeError(Exception):
    """Base of all errors that ddtree raises on purpose."""


class ConfigError(DDTreeError, ValueError):
    """An argument or option has a value that cannot work."""


class CheckpointError(DDTreeError):
    """A checkpoint is missing, damaged, or does not fit its target."""


class UnsupportedModelError(DDTreeError):
    """The model cannot be used in the way that was asked."""


class PromptError(DDTreeError, ValueError):
    """The prompt is empty or does not fit the context."""


class CacheMemoryError(DDTreeError, MemoryError):
    """The key/value cache does not fit into the device's memory."""
