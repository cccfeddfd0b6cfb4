"""One module per kind of loss: its LOSS, and the options that families trained by it take."""
