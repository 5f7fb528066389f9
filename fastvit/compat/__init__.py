"""apex and inplace_abn for scripts that were written for them."""
