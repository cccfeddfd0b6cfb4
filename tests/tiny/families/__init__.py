"""One module per family: its MODELS, by the names that tests call them by. A new file is tested the day it appears."""
