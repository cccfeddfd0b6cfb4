"""The machinery of rounds: state, groups, exact all-reduce, donors, and the process that runs them."""
