"""Old place of the depth options; remove in the next release."""
