{{/* Egress rules; arguments: root, targets (a list of cidr, except, ports). */}}
{{- define "batchllm.egress" -}}
{{- $dns := .root.Values.networkPolicy.dns -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ $dns.namespace | quote }}
      podSelector:
        matchLabels:
          {{- toYaml $dns.podLabels | nindent 10 }}
    {{- range $dns.cidrs }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- range .targets }}
- to:
    - ipBlock:
        cidr: {{ .cidr | quote }}
        {{- with .except }}
        except:
          {{- toYaml . | nindent 10 }}
        {{- end }}
  ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ int64 . }}}
    {{- end }}
{{- end }}
{{- end -}}
