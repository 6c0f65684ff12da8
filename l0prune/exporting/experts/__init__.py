"""A mixture of experts with fewer of them."""
