"""Results of training: what a run leaves behind, and the forms in which other tools take it, one module per form."""
