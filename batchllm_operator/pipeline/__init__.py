"""Names of earlier releases; each module says what to use."""
