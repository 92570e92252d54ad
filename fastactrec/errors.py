"""What can go wrong, by kind. Every message names the file or option and the cure."""


class FastactrecError(Exception):
    """Base of all errors raised on purpose."""


class InputError(FastactrecError):
    """A path, option, file or environment that the user can put right; commands exit with code 2."""


class PackError(InputError):
    """A pack is missing, damaged, or of a format this version does not read."""


class CheckpointError(InputError):
    """A checkpoint or weight file is missing, damaged, or of another model."""


class DecodeError(FastactrecError):
    """A video or JPEG does not decode whole."""


class AveragingError(FastactrecError):
    """Ranks disagree about what is averaged, or an averaging failed."""
