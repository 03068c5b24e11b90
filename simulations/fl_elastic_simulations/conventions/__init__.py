"""How published schemes were found, beside the policies that use them."""
