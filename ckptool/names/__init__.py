"""Which key becomes which: names with variables, rules `OLD => NEW : OPERATION`, files of them, layouts that ship."""
