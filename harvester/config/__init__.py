"""Finds and checks the configuration, and derives the options of each Kafka client from it.

`load_config` reads a TOML file; `Config(...)` builds a configuration in Python. Both hold effective values only, or
raise ConfigurationError with all problems.

`model` declares the settings, with the kinds of values in `fields` and the rules between times in `timing`. `load`
reads the file, overrides and the environment. `describe` serves `harvester config` and a reload.
"""

from harvester.config.describe import as_json, check_clients, in_effect, settings_of
from harvester.config.durations import format_duration, parse_duration
from harvester.config.kafka_options import MASK, mask_options
from harvester.config.load import DEFAULT_FILE, ENV_VARIABLE, Loaded, load, load_config
from harvester.config.model import Config, Control, Http, Limits, Logging, PoisonSettings

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
