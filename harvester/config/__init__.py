"""Configuration: where it is found, what every setting means, and what each client is told.

`load_config` reads a TOML file; `Config(...)` builds one in Python. Either gives effective values only, or raises
ConfigurationError with everything that is wrong. All of it is pure but for reading the file, the environment and
the process's name.
"""

from harvester.config.client_check import check_clients
from harvester.config.describe import as_json, in_effect, settings_of
from harvester.config.durations import format_duration, parse_duration
from harvester.config.load import DEFAULT_FILE, ENV_VARIABLE, Loaded, load, load_config
from harvester.config.model import Config, Control, Http, Limits, Logging, PoisonSettings
from harvester.config.secrets import MASK, mask_options

__all__ = [
    "DEFAULT_FILE",
    "ENV_VARIABLE",
    "MASK",
    "Config",
    "Control",
    "Http",
    "Limits",
    "Loaded",
    "Logging",
    "PoisonSettings",
    "as_json",
    "check_clients",
    "format_duration",
    "in_effect",
    "load",
    "load_config",
    "mask_options",
    "parse_duration",
    "settings_of",
]
