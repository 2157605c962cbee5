//go:build unix && !linux

package main

import (
	"errors"
	"syscall"
)

type processors struct{}

var allProcessors processors

func twoProcessors() (one, two processors, ok bool) { return one, two, false }
func setAffinity(int, processors) error             { return errors.ErrUnsupported }
func pinSelf(processors) error                      { return errors.ErrUnsupported }
func dieWithParent(*syscall.SysProcAttr)            {}
