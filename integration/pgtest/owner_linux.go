package pgtest

import "syscall"

// dieWithOwner lets the kernel stop the server when the thread that started it ends. A ^C at the terminal does not reach
// it, so that its owner has a database to the end.
func dieWithOwner(attr *syscall.SysProcAttr) {
	attr.Pdeathsig = syscall.SIGQUIT
	attr.Setpgid = true
}
