"""The certificate: measured proof that two models compute the same."""
