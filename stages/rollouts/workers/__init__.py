"""Model servers as supervised workers: started or attached, verified, watched and replaced."""
